"""Strides: a replica's parameter, and its gradient, lie as the original does. Recurrent networks among them."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_grads, inputs, make, mean_grads
from steps import step_is_right
from strategies import CPU, examples
from torch import Tensor, nn
from torch.nn.utils import rnn

from knownddp import KnownDDP, ReplicaError
from knownddp.replicas import copied, replicate


def laid_out(shape: list[int], order: list[int], *, seed: int = 0) -> Tensor:
    """A dense tensor whose dimension ``order[0]`` has the largest stride, and so on."""
    values = inputs(seed, *shape)
    return values.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])


shapes_and_orders = st.lists(st.integers(1, 4), min_size=1, max_size=5).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
)


class Weighted(nn.Module):
    """``x`` times the sum of r w^2, where w is the weight and r = 1, 2, ... by index."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.seen: list[Tensor] = []  # the weight of each replica; the list is shared by all, which take turns
        self.grads: dict[int, Tensor] = {}  # of weights of replicas but the first, as autograd passes them on

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_leaf:
            self.weight.register_hook(functools.partial(self.grads.__setitem__, len(self.seen)))
        self.seen.append(self.weight)
        ranks = torch.arange(1.0, self.weight.numel() + 1).reshape(self.weight.shape)
        return x * (self.weight.square() * ranks).sum()


# -- parameters and gradients


@given(drawn=shapes_and_orders)
@examples(100)
def test_a_copy_has_the_values_and_strides_of_a_dense_tensor(drawn):
    tensor = laid_out(*drawn)
    copy_of_it = copied(tensor, CPU)
    assert copy_of_it.stride() == tensor.stride() and torch.equal(copy_of_it, tensor)
    assert copy_of_it.data_ptr() != tensor.data_ptr()


@given(drawn=shapes_and_orders)
@examples(60)
def test_replicas_and_all_gradients_have_the_strides_of_the_parameter(drawn):
    """The gradient of w is 2 r w times the sum of x; elements taken in the order of memory would meet other r."""
    model = KnownDDP(Weighted(laid_out(*drawn)), device_ids=["cpu"] * 3)
    weight = model.module.weight
    model(torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    ranks = torch.arange(1.0, weight.numel() + 1).reshape(weight.shape)
    torch.testing.assert_close(weight.grad, 14 * ranks * weight.detach(), rtol=1e-4, atol=1e-5)
    assert weight.grad.stride() == weight.stride()
    assert model.module.seen[0] is weight
    for replica, row in ((1, 2), (2, 4)):
        twin, grad = model.module.seen[replica], model.module.grads[replica]
        assert twin.stride() == grad.stride() == weight.stride() and torch.equal(twin, weight)
        torch.testing.assert_close(grad, 2 * row * ranks * weight.detach(), rtol=1e-4, atol=1e-5)


def _channels_last(rank: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)

    def loss(module: nn.Module, r: int, step: int) -> Tensor:
        x = inputs(r, 4, 3, 6, 6, seed=step)
        return module(x.to(memory_format=torch.channels_last) if step % 2 else x).square().mean()

    plain, model = make(build, device_ids=["cpu"] * 2)
    for step in range(4):
        step_is_right(plain, model, rank, step, loss)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_channels_last_convolutions(ranks, world_size):
    ranks(world_size, _channels_last)


def _differing(rank: int, order: list[int]) -> tuple[int, ...]:
    """Rank 1 has another layout; rank 0's counts, for its replicas too."""
    weight = laid_out([2, 3, 4], [0, 1, 2] if rank == 0 else order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fix-up
        model = KnownDDP(Weighted(weight), device_ids=["cpu"] * 2)
    model(torch.tensor([1.0, 2.0 + rank])).sum().backward()
    r = torch.arange(1.0, 25).reshape(2, 3, 4)
    wanted = 2 * r * laid_out([2, 3, 4], [0, 1, 2]) * 3.5  # the mean of 3 and 4
    torch.testing.assert_close(model.module.weight.grad, wanted)
    return model.module.seen[1].stride()


@pytest.mark.parametrize("order", [[0, 2, 1], [2, 1, 0], [1, 0, 2]])
def test_layouts_that_differ_between_ranks_are_fixed_up_before_they_are_replicated(ranks, order):
    assert ranks(2, _differing, order) == [(12, 4, 1)] * 2


LOOSE = {
    "expanded": torch.arange(3.0).expand(2, 3),
    "sliced": torch.arange(8.0).reshape(2, 4)[:, :3],
    "strided": torch.arange(12.0).reshape(2, 6)[:, ::2],
    "sliced and transposed": torch.arange(9.0).reshape(3, 3).t()[:2],
}


@pytest.mark.parametrize("weight", LOOSE.values(), ids=LOOSE)
@pytest.mark.parametrize(
    ("init_sync", "warning"),
    [
        (True, r"1 parameters were not dense .* share memory with nothing now: weight\."),
        (False, r"row-major in replicas: weight\."),
    ],
)
def test_a_parameter_that_is_not_dense_is_row_major_in_replicas_with_a_warning(weight, init_sync, warning):
    with pytest.warns(UserWarning, match=warning) as caught:
        model = KnownDDP(Weighted(weight), device_ids=["cpu"] * 2, init_sync=init_sync)
    assert [one.filename for one in caught] == [__file__]
    model(torch.tensor([1.0, 2.0])).sum().backward()
    twin = model.module.seen[1]
    assert twin.stride() == model.module.grads[1].stride() == (3, 1) and torch.equal(twin, weight)
    ranks = torch.arange(1.0, 7).reshape(2, 3)
    torch.testing.assert_close(model.module.weight.grad, 6 * ranks * weight)


# -- recurrent networks

KINDS = {
    "rnn": (nn.RNN, {}),
    "gru, two layers": (nn.GRU, {"num_layers": 2}),
    "lstm, both directions": (nn.LSTM, {"bidirectional": True}),
    "lstm, projections": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "gru, no bias": (nn.GRU, {"bias": False}),
}


class Recurrent(nn.Module):
    """Takes a padded batch and lengths, as examples do; or a packed batch."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(3, 4, batch_first=True, **options)

    def forward(self, x: Tensor | rnn.PackedSequence, lengths: Tensor | None = None, *, pads_to: int | None = 6) -> Any:
        if isinstance(x, rnn.PackedSequence):
            return self.recurrent(x)[0]
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=pads_to)[0]


def _batch(step: int = 0) -> tuple[Tensor, Tensor]:
    return inputs(step, 5, 6, 3), torch.tensor([2, 6, 1, 3, 4])


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_recurrent_networks_train_without_a_warning(kind, options):
    """Warnings are errors here, that of weights which are not one chunk among them."""
    plain, model = make(lambda: Recurrent(kind, **options), device_ids=["cpu"] * 2)
    for step in range(3):
        model.zero_grad()
        model(*_batch(step)).square().sum().backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, _, s=step: m(*_batch(s)).square().sum()))


def test_the_weights_of_a_replica_are_its_own_and_where_cudnn_does_not_apply_not_one_chunk():
    original = nn.LSTM(3, 4)
    replica = replicate(original, CPU)
    weights, flat = list(replica._parameters.values()), replica._flat_weights
    assert all(one is other for one, other in zip(weights, flat, strict=True))
    assert all(twin is not param for twin, param in zip(weights, original.parameters(), strict=True))
    assert len({twin.untyped_storage().data_ptr() for twin in weights}) == len(weights)
    assert all(one is other for one, other in zip(original._flat_weights, original.parameters(), strict=True))


def test_a_packed_batch_is_split_by_sequences_and_joined():
    plain, model = make(lambda: Recurrent(nn.LSTM), device_ids=["cpu"] * 3)
    packed = rnn.pack_padded_sequence(*_batch(), batch_first=True, enforce_sorted=False)
    ours, theirs = model(packed), plain(packed)
    pad = rnn.pad_packed_sequence
    torch.testing.assert_close(pad(ours)[0], pad(theirs)[0])
    ours.data.square().sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(packed).data.square().sum()))


def test_padding_to_each_replicas_own_length_is_an_error_that_names_the_way_out():
    """Replica 0 has lengths 2, 6, 1 and replica 1 lengths 3, 4."""
    model = KnownDDP(Recurrent(nn.GRU), device_ids=["cpu"] * 2)
    with pytest.raises(ReplicaError) as caught:
        model(*_batch(), pads_to=None)
    assert "output has size 4 in dimension 1 on replica 1, and 6 on replica 0" in str(caught.value)
    assert "pad_packed_sequence(..., total_length=n)" in str(caught.value)
    model(*_batch()).sum().backward()  # the wrapper is as good as before


def test_tied_parameters_have_one_copy_a_replica():
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    replica = replicate(tied, CPU)
    assert replica[0].weight is replica[1].weight and replica[0].bias is not replica[1].bias
    plain, model = copy.deepcopy(tied), KnownDDP(tied, device_ids=["cpu"] * 2)
    x = inputs(0, 4, 3)
    model(x).square().sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(x).square().sum()))
