"""Layouts: element (i, j) is averaged with element (i, j), however each rank stores it, and ``.grad`` lies as the
parameter does.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import TINY_CAP_MB, from_all_ranks, setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn
from torch.nn.utils import rnn

from knownddp import KnownDDP


def _turned(tensor: Tensor) -> Tensor:
    """The same values, stored with the last two dimensions exchanged."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _strides_match(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert param.grad.stride() == param.stride(), f"{name}: {param.grad.stride()} for {param.stride()}"


# -- one layout on all ranks


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 1, (1, 3))]
    return nn.Sequential(*layers)


def _convolution_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    x = inputs(rank, 2, 3, 9, 9, seed=step)
    return module(x.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)).square().mean()


def _channels_last(rank: int, cap: float | None, views: bool) -> None:
    plain, model = make(
        lambda: _convolutions().to(memory_format=torch.channels_last), bucket_cap_mb=cap, gradient_as_bucket_view=views
    )
    for step in range(4):
        step_is_right(plain, model, rank, step, _convolution_loss)
        _strides_match(model)
        model.zero_grad(set_to_none=False)  # the gradients that stand there now are kept and written to
        _convolution_loss(model, rank, step).backward()
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: _convolution_loss(m, r, s)))
        _strides_match(model)


@pytest.mark.parametrize("views", [False, True])
@setups
def test_channels_last_gradients_have_the_strides_of_their_parameters(ranks, world_size, cap, views):
    ranks(world_size, _channels_last, cap, views)


class _OneByOne(nn.Module):
    """A kernel whose gradient comes with other strides in its dimensions of size 1."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        weight = torch.arange(12.0).reshape(4, 3, 1, 1) / 12
        self.weight = nn.Parameter(weight.to(memory_format=torch.channels_last) if channels_last else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.permute(0, 2, 3, 1).reshape(4, 3).t()


def _one_by_one(rank: int, cap: float | None, odd: int | None) -> None:
    """A warning would be an error here."""
    model = KnownDDP(_OneByOne(channels_last=rank == odd), bucket_cap_mb=cap)
    steps_are_right(_OneByOne(), model, rank)
    _strides_match(model)


@pytest.mark.parametrize("odd", [None, 0, 1], ids=["alike", "odd-rank-0", "odd-rank-1"])
@setups
def test_strides_that_differ_in_dimensions_of_size_1_are_no_difference(ranks, world_size, cap, odd):
    ranks(world_size, _one_by_one, cap, odd)


class _Weight(nn.Module):
    """A matrix whose gradient is 6 (r + 1) times ``PATTERN``, on rank r."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(weight)

    def forward(self, rank: int) -> Tensor:
        return (self.weight * PATTERN * (6 * (rank + 1))).sum() + self.bias


PATTERN = torch.arange(1.0, 13.0).reshape(3, 4)
START = torch.arange(12.0).reshape(3, 4)


def _mean_of_pattern() -> Tensor:
    """Two ranks: (6 + 12) / 2 = 9; three: (6 + 12 + 18) / 3 = 12."""
    return PATTERN * {2: 9, 3: 12}[dist.get_world_size()]


@pytest.mark.parametrize("lay_out", [torch.clone, _turned], ids=["row-major", "turned"])
@setups
def test_any_layout_that_all_ranks_share_gives_the_mean_in_it(ranks, world_size, cap, lay_out):
    ranks(world_size, _shared_layout, cap, lay_out)


def _shared_layout(rank: int, cap: float | None, lay_out: Callable[[Tensor], Tensor]) -> None:
    model = KnownDDP(_Weight(lay_out(START)), bucket_cap_mb=cap)
    weight = model.module.weight
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank).backward()
        assert torch.equal(weight.grad, _mean_of_pattern())
        assert weight.grad.stride() == weight.stride() == lay_out(START).stride()


# -- layouts that differ between ranks


def _differs_at_construction(rank: int, odd: int, cap: float | None) -> list[str]:
    """Rank 0's values and layout, in the Parameter objects of each rank; whoever had another is told."""
    module = _Weight(_turned(START) if rank == odd else START.clone())
    with torch.no_grad():
        module.weight += 100 * rank
    weight = module.weight
    strides = weight.stride()
    with pytest.warns() if (rank == odd) != (odd == 0) else _nothing() as told:
        model = KnownDDP(module, bucket_cap_mb=cap)
    assert model.module.weight is weight
    assert torch.equal(weight, START)
    assert weight.stride() == ((1, 3) if odd == 0 else (4, 1))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank).backward()
        assert torch.equal(weight.grad, _mean_of_pattern())
        assert weight.grad.stride() == weight.stride()
    assert (strides == weight.stride()) == (not told)
    return [str(one.message) for one in told]


class _nothing:
    """A warning would be an error here."""

    def __enter__(self) -> list[Warning]:
        return []

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("odd", [0, 1])
@setups
def test_a_parameter_stored_otherwise_on_one_rank_is_laid_out_like_rank_0s_with_one_warning(
    ranks, world_size, cap, odd
):
    for rank, told in enumerate(ranks(world_size, _differs_at_construction, odd, cap)):
        was_moved = (rank == odd) != (odd == 0)
        assert len(told) == was_moved
        assert all(
            f"[rank {rank} of {world_size}]" in text and "like there, values kept: weight." in text for text in told
        )


def _strict_about_warnings(rank: int) -> None:
    """Where warnings are errors, rank 1's construction raises; rank 0 is not left waiting for it."""
    if rank == 1:
        with pytest.raises(UserWarning, match="other strides than on rank 0"):
            KnownDDP(_Weight(_turned(START)))
    else:
        KnownDDP(_Weight(START.clone()))


def test_the_warning_about_strides_raised_as_an_error_leaves_no_rank_waiting(ranks):
    ranks(2, _strict_about_warnings)


def _by_data(module: _Weight) -> None:
    module.weight.data = _turned(module.weight.data)


def _by_new_parameter(module: _Weight) -> None:
    module.weight = nn.Parameter(_turned(module.weight.detach()))


def _differs_later(rank: int, change: Callable[[_Weight], None], cap: float | None) -> None:
    model = KnownDDP(_Weight(START.clone()), bucket_cap_mb=cap)
    model(rank).backward()
    for step in range(4):
        if rank == 1 and step == 1:
            change(model.module)
        model.zero_grad(set_to_none=step % 2 == 0)
        model(rank).backward()
        weight = model.module.weight
        assert torch.equal(weight.grad, _mean_of_pattern())
        if step == 2:  # a gradient made afresh after the change
            assert weight.grad.stride() == weight.stride() == ((1, 3) if rank == 1 else (4, 1))


@pytest.mark.parametrize("change", [_by_data, _by_new_parameter])
@setups
def test_a_layout_changed_later_on_one_rank_still_gives_the_mean_by_index(ranks, world_size, cap, change):
    ranks(world_size, _differs_later, change, cap)


def _channels_last_later(rank: int) -> None:
    plain, model = make(_convolutions)
    for step in range(4):
        if rank == 1 and step == 2:
            model.to(memory_format=torch.channels_last)
        step_is_right(plain, model, rank, step, _convolution_loss)
        _strides_match(model)


@world_sizes
def test_one_rank_turns_to_channels_last_in_the_middle_of_training(ranks, world_size):
    ranks(world_size, _channels_last_later)


def _old_gradients_turned(rank: int) -> None:
    """What stands in ``.grad`` may lie otherwise than the parameter; it is 60 PATTERN on rank 1 alone."""
    model = KnownDDP(_Weight(START.clone()))
    weight = model.module.weight
    weight.grad = _turned(PATTERN * 60) if rank == 1 else torch.zeros_like(weight)
    model(rank).backward()
    assert torch.equal(weight.grad, _mean_of_pattern() + PATTERN * 60 / dist.get_world_size())


@world_sizes
def test_an_old_gradient_in_another_layout_is_averaged_by_index(ranks, world_size):
    """60 / 2 = 30 and 60 / 3 = 20 times the pattern more."""
    ranks(world_size, _old_gradients_turned)


class _Expanding(nn.Module):
    """Gradients that come broadcast (stride 0), transposed and narrowed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 4))
        self.second = nn.Parameter(torch.ones(3, 4))
        self.third = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: float) -> Tensor:
        return (self.first.sum() + (self.second.t() * PATTERN.t().contiguous()).sum() + self.third[:, 1].sum()) * x


def _odd_gradients(rank: int, cap: float | None) -> None:
    model = KnownDDP(_Expanding(), bucket_cap_mb=cap)
    factor = {2: 9.0, 3: 12.0}[dist.get_world_size()]
    column = torch.zeros(3, 4)
    column[:, 1] = factor
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(6.0 * (rank + 1)).backward()
        assert torch.equal(model.module.first.grad, torch.full((3, 4), factor))
        assert torch.equal(model.module.second.grad, PATTERN * factor)
        assert torch.equal(model.module.third.grad, column)
        _strides_match(model)


@setups
def test_gradients_that_autograd_delivers_in_odd_layouts(ranks, world_size, cap):
    """x is 6 (r + 1): 9 on average over two ranks, 12 over three."""
    ranks(world_size, _odd_gradients, cap)


# -- recurrent layers


class _PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        packed = rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        padded, _ = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.size(1))
        return self.out(padded)


class _FromPacked(_PackedLSTM):
    """Takes and returns a PackedSequence."""

    def forward(self, packed: rnn.PackedSequence) -> rnn.PackedSequence:  # type: ignore[override]
        output = self.lstm(packed)[0]
        return output._replace(data=self.out(output.data))


LENGTHS = [[2, 6, 1], [3, 3, 5], [1, 1, 1]]


def _packed(rank: int, cap: float | None) -> None:
    plain, model = make(_PackedLSTM, bucket_cap_mb=cap)
    steps_are_right(
        plain,
        model,
        rank,
        lambda m, r, step: m(inputs(r, 3, 6, 3, seed=step), LENGTHS[(r + step) % 3]).square().mean(),
    )


@setups
def test_an_lstm_on_packed_sequences_of_uneven_lengths(ranks, world_size, cap):
    ranks(world_size, _packed, cap)


def _packed_through(rank: int) -> None:
    plain, model = make(_FromPacked)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        sequences = [inputs(r, n, 3, seed=step) for n in sorted(LENGTHS[(r + step) % 3], reverse=True)]
        output = module(rnn.pack_sequence(sequences))
        assert isinstance(output, rnn.PackedSequence)
        return output.data.square().mean()

    steps_are_right(plain, model, rank, loss_of)


@world_sizes
def test_packed_sequences_go_in_and_come_out(ranks, world_size):
    ranks(world_size, _packed_through)


def _laid_out_anew(rank: int, is_late: bool) -> None:
    """Parameters are turned in place, or between a forward and its backward."""
    plain, model = make()
    steps_are_right(plain, model, rank)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        early = square_loss(model, rank, step) if is_late else None
        for module in (model.module, plain):
            for layer in module.layers:
                weight = layer.weight.data
                layer.weight.data = weight.t().contiguous().t() if is_late else weight.t()
        (square_loss(model, rank, step) if early is None else early).backward()
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s)))
        assert [p.grad.stride() for p in model.parameters()] == [p.stride() for p in model.parameters()]


@pytest.mark.parametrize("is_late", [False, True])
def test_parameters_may_be_laid_out_anew(ranks, is_late):
    ranks(2, _laid_out_anew, is_late)


def _bitwise(rank: int) -> None:
    """Two ranks of different layouts end a training with the same bits."""
    torch.manual_seed(0)
    module = _convolutions()
    if rank == 1:
        module.to(memory_format=torch.channels_last)
        with pytest.warns(UserWarning, match="other strides than on rank 0"):
            model = KnownDDP(module, bucket_cap_mb=TINY_CAP_MB)
    else:
        model = KnownDDP(module, bucket_cap_mb=TINY_CAP_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        model(inputs(rank, 2, 3, 9, 9, seed=step)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in from_all_ranks(weights))


def test_replicas_that_were_laid_out_differently_stay_equal_to_the_last_bit(ranks):
    ranks(2, _bitwise)


def test_the_pattern_tells_rows_from_columns():
    """Summed crosswise, in memory order, a turned gradient would give something else."""
    crosswise = (PATTERN.flatten() + 2 * PATTERN.t().flatten()).reshape(3, 4)
    assert not torch.equal(crosswise, PATTERN * 3)
