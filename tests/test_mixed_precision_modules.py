"""``mixed_precision`` and modules that are recurrent, tied, sparse, normalised, ignored, wrapped or skipped.

The oracle is in ``lowered.py``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowered import BF16, FLOAT_WIRE, Lowered, assert_in_place, low_grads, low_step_is_right
from models import Skippable, assert_grads, inputs, make
from steps import declares, square_loss
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import pack_sequence

from knownddp import KnownDDP

every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3])


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, bidirectional=bidirectional)

    def forward(self, x: Any) -> Tensor:
        assert {w.dtype for w in self.rnn._flat_weights} <= {torch.float32, torch.bfloat16}
        return self.rnn(x)[0]


def _recurrent(rank: int, kind: type[nn.RNNBase], bidirectional: bool) -> None:
    plain, model = make(lambda: _Recurrent(kind, bidirectional), mixed_precision=FLOAT_WIRE)
    rnn = model.module.rnn

    def loss_of(module: nn.Module, r: int, packed: bool) -> Tensor:
        x = pack_sequence([inputs(r, 4, 3), inputs(r, 2, 3)]) if packed else inputs(r, 4, 2, 3)
        out = module(x)
        return (out.data if packed else out).square().mean()

    for packed in (False, True, False):
        low_step_is_right(plain, model, rank, lambda m, r, p=packed: loss_of(m, r, p))
        assert all(w is p for w, p in zip(rnn._flat_weights, rnn.parameters(), strict=True))
        assert not rnn._weights_have_changed()
        assert rnn(inputs(rank, 4, 2, 3))[0].dtype == torch.float32


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules(ranks, kind, bidirectional):
    ranks(2, _recurrent, kind, bidirectional)


class _Tied(nn.Module):
    """An embedding whose weight a linear layer shares; ``direct`` reads it a third time, from outside of its module."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.direct = direct

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.head.weight is self.embed.weight
        x = torch.tanh(self.body(self.embed(tokens)))
        return self.head(x) + (nn.functional.linear(x, self.embed.weight) if self.direct else 0)


def _tied(rank: int, direct: bool) -> None:
    plain, model = make(lambda: _Tied(direct), mixed_precision=FLOAT_WIRE)
    for step in range(2):
        tokens = [torch.tensor([r, (r + step) % 5, 4]) for r in range(3)]
        low_step_is_right(plain, model, rank, lambda m, r, t=tokens: m(t[r]).square().mean())
        assert model.module.head.weight is model.module.embed.weight


@pytest.mark.parametrize("direct", [False, True])
@every_world_size
def test_tied_weights_have_one_cast(ranks, world_size, direct):
    ranks(world_size, _tied, direct)


def _sparse(rank: int) -> None:
    """Rows 0 to 2 of rank r get r + 1, 0, 2 * (r + 1): exact in bfloat16."""
    model = KnownDDP(nn.Embedding(3, 2, sparse=True), mixed_precision=FLOAT_WIRE)
    for _ in range(2):
        model.zero_grad()
        (model(torch.tensor([0, 2, 2])).sum() * (rank + 1)).backward()
        grad = model.module.weight.grad
        assert grad.is_sparse and grad.dtype == torch.float32
        assert grad.to_dense().tolist() == [[1.5, 1.5], [0.0, 0.0], [3.0, 3.0]]
    assert_in_place(model)


def test_sparse_gradients(ranks):
    """The mean of 1 and 2, and of 2 and 4."""
    ranks(2, _sparse)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def _normed(rank: int, ignored: bool) -> None:
    """One rank, whose buffers nobody overwrites: they follow those of a module that holds them as bfloat16. What is
    ignored stays float32: batch norm then computes in float32."""
    plain = _Normed()
    wrapped = copy.deepcopy(plain)
    if ignored:
        names = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
        KnownDDP._set_params_and_buffers_to_ignore_for_model(wrapped, names)
        plain.linear.bfloat16()
    else:
        plain.bfloat16()
    buffers = list(wrapped.buffers())
    model = KnownDDP(wrapped, mixed_precision=_MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
    assert all(ours is before for ours, before in zip(model.buffers(), buffers, strict=True))
    for step in range(3):
        x = inputs(rank, 5, 3, seed=step)
        assert torch.equal(model(x), plain(x.bfloat16()))
        for name, buffer in plain.named_buffers():
            ours = wrapped.get_buffer(name)
            assert ours.dtype == buffer.dtype and torch.equal(ours, buffer)
    assert wrapped.norm.num_batches_tracked.item() == 3
    assert wrapped.norm.running_mean.dtype == (torch.float32 if ignored else torch.bfloat16)


@pytest.mark.parametrize("ignored", [False, True])
def test_buffers_are_cast_once_but_for_integers(ranks, ignored):
    ranks(1, _normed, ignored)


def _buffers_of_rank_0(rank: int) -> tuple[list[float], list[torch.dtype]]:
    """BatchNorm's momentum is 1, so its mean is that of the last input: 8 * step + rank, exact in bfloat16."""
    module = nn.BatchNorm1d(1, momentum=1.0)
    model = KnownDDP(module, mixed_precision=_MixedPrecision(torch.bfloat16, None, torch.bfloat16))
    seen = []
    module.register_forward_pre_hook(lambda m, _: seen.append(m.running_mean.item()))
    for step in range(1, 4):
        model(torch.tensor([[8.0 * step + rank - 0.5], [8.0 * step + rank + 0.5]])).sum().backward()
    return seen, [buffer.dtype for buffer in module.buffers()]


def test_low_buffers_are_brought_to_those_of_rank_0(ranks):
    dtypes = [torch.bfloat16, torch.bfloat16, torch.int64]
    assert ranks(2, _buffers_of_rank_0) == [([0.0, 8.0, 16.0], dtypes)] * 2


def _ignored(rank: int) -> None:
    """An ignored parameter keeps dtype and gradient to each rank itself."""
    ignored = ["layers.0.weight", "layers.0.bias", "buffer"]
    torch.manual_seed(0)
    plain = _IgnoresSome()
    wrapped = copy.deepcopy(plain)
    KnownDDP._set_params_and_buffers_to_ignore_for_model(wrapped, ignored)
    config = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = KnownDDP(wrapped, mixed_precision=config)
    assert model.module.buffer.dtype == torch.float32
    square_loss(model, rank).backward()
    wanted = low_grads(plain, square_loss, kept=ignored)
    low = Lowered(plain, kept=ignored)
    square_loss(low, rank).backward()
    wanted |= {name: p.grad for name, p in low.module.named_parameters() if name in ignored}
    assert_grads(model, wanted)
    assert_in_place(model)


class _IgnoresSome(Skippable):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0]
        assert first.weight.dtype == torch.float32 and self.layers[1].weight.dtype == x.dtype == torch.bfloat16
        return super().forward(x + first(x.float()).bfloat16(), skip={0})


def test_ignored_parameters_and_buffers_keep_their_dtype(ranks):
    ranks(2, _ignored)


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


class _Notes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


def _inner_wrapper(rank: int) -> None:
    inner = KnownDDP(_Notes(3, 2), mixed_precision=_MixedPrecision(torch.float64))
    model = KnownDDP(_Outer(inner), mixed_precision=BF16)
    for step in range(2):
        output = model(inputs(rank, 5, 3, seed=step))
        assert output.dtype == torch.float64 and inner.module.seen == (torch.float64, torch.float64)
        output.sum().backward()
        assert_in_place(model)
        assert_in_place(inner)


def test_an_inner_wrapper_chooses_for_itself(ranks):
    ranks(2, _inner_wrapper)


# -- unused parameters


class _Declares(Skippable):
    """Says inside of its forward what it skips, by the tensors that stand in its layers then."""

    wrapper: weakref.ref[KnownDDP] | None = None

    def forward(self, x: Tensor, skip: Iterable[int] = ()) -> Tensor:
        if self.wrapper is not None:
            self.wrapper().mark_unused([p for i in skip for p in self.layers[i].parameters()])
        return super().forward(x, skip)


def _skipping(rank: int, way: str) -> None:
    """Ranks skip layer ``step`` alike; what is skipped keeps no gradient."""
    plain, model = make(_Declares, mixed_precision=FLOAT_WIRE, find_unused_parameters=way == "detected")
    if way == "marked":
        model.module.wrapper = weakref.ref(model)
    parameters = list(model.parameters())
    for step in range(4):

        def loss_of(module: nn.Module, r: int, step: int = step) -> Tensor:
            declared = declares(module, module.module.of({step})) if way == "declared" else {}
            return module(inputs(r, 5, 3, seed=step), skip={step}, **declared).square().mean()

        wanted = low_step_is_right(plain, model, rank, loss_of)
        assert wanted[f"layers.{step}.weight"] is None
        if way != "detected" or dist.get_world_size() > 1:
            assert model.stats().bytes_skipped > 0
    assert all(ours is before for ours, before in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("way", ["declared", "marked", "detected"])
@every_world_size
def test_skipped_layers(ranks, world_size, way):
    ranks(world_size, _skipping, way)
