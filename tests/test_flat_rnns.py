"""Recurrent layers under KnownDDP: what is one chunk of memory stays one, and what cuDNN would run becomes one.

Without cuDNN the weights of an RNN are tensors of their own, and torch never lays them together.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, mean_grads
from torch import Tensor, nn

from knownddp import KnownDDP, compact_parameters
from knownddp.rnns import chunk_of, is_flat

RNNS: list[Callable[[], nn.RNNBase]] = [
    lambda: nn.RNN(2, 3),
    lambda: nn.GRU(2, 3, num_layers=2, bidirectional=True),
    lambda: nn.LSTM(2, 3, num_layers=2, bias=False),
    lambda: nn.LSTM(2, 3, num_layers=2, proj_size=2, bidirectional=True),
]
NUMBERS = pytest.mark.parametrize("number", range(len(RNNS)), ids=["rnn", "gru-2x2", "lstm-no-bias", "lstm-projected"])


class _Recurrent(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.rnn = RNNS[number]()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.before(x))[0]


def _model(number: int) -> _Recurrent:
    torch.manual_seed(0)
    return _Recurrent(number)


def _loss(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    dtype = next(module.parameters()).dtype
    return module(inputs(rank, 4, 2, 2, seed=step).to(dtype)).square().mean()


def _storages(rnn: nn.RNNBase) -> int:
    return len({param.untyped_storage().data_ptr() for param in rnn.parameters()})


def _check_chunk(rnn: nn.RNNBase) -> None:
    """One storage without gaps: matrices of all layers in the order of ``parameters()``, then biases."""
    place, (first, *_) = 0, rnn.parameters()
    matrices = [param for param in rnn.parameters() if param.dim() == 2]
    for param in (*matrices, *(param for param in rnn.parameters() if param.dim() == 1)):
        assert param.data_ptr() == first.data_ptr() + place
        place += param.nbytes
    assert first.untyped_storage().nbytes() == place
    assert _storages(rnn) == 1
    _check_lists(rnn)


def _check_lists(rnn: nn.RNNBase) -> None:
    """What the RNN computes with are its parameters."""
    assert all(weight is param for weight, param in zip(rnn._flat_weights, rnn.parameters(), strict=True))
    assert not rnn._weights_have_changed()


def _step_is_right(plain: nn.Module, model: KnownDDP, rank: int) -> None:
    plain = copy.deepcopy(plain).to(next(model.parameters()).dtype)
    model.zero_grad()
    _loss(model, rank).backward()
    assert_grads(model, mean_grads(plain, dist.get_world_size(), _loss))


# -- chunks stay


def _life_of_a_chunk(rank: int, number: int) -> None:
    plain = _model(number)
    module = copy.deepcopy(plain)
    compact_parameters(module)
    place = module.rnn.weight_ih_l0.data_ptr()
    model = KnownDDP(module)
    rnn = model.module.rnn
    assert rnn.weight_ih_l0.data_ptr() == place  # rank 0's values came into what was there
    for happens in (
        lambda: model.load_state_dict(model.state_dict()),
        lambda: model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True),
        lambda: model.to(torch.float64),
        lambda: model.float(),
        lambda: model.to(memory_format=torch.channels_last),
    ):
        happens()
        _loss(model, rank).backward()  # where parameters were replaced, the RNN notices now
        _check_chunk(rnn)
        _step_is_right(plain, model, rank)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        _check_chunk(rnn)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@NUMBERS
def test_a_chunk_stays_one_whatever_happens_to_the_wrapper(ranks, number):
    """Wrapping, loading in place and by assignment, other dtypes; a warning would be an error."""
    ranks(2, _quiet, _life_of_a_chunk, number)


def _quiet(rank: int, task: Callable[[int, int], None], number: int) -> None:
    """The one warning that has nothing to do with chunks: oneDNN, on the CPU, does not know projections."""
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
    task(rank, number)


def _chunk_on_one_rank(rank: int, number: int) -> None:
    """Rank 0 holds one matrix of separate weights by columns; the others hold a chunk, and turn the matrix in it."""
    plain, module = _model(number), _model(number)
    if rank == 0:
        module.rnn.weight_hh_l0.data = module.rnn.weight_hh_l0.data.t().contiguous().t()
        model = KnownDDP(module)
        assert _storages(module.rnn) == len(list(module.rnn.parameters()))
    else:
        compact_parameters(module)
        with pytest.warns(UserWarning, match=r"laid out like there, values kept: rnn\.weight_hh_l0\."):
            model = KnownDDP(module)
        _check_chunk(module.rnn)
    rows = module.rnn.weight_hh_l0.shape[0]
    assert module.rnn.weight_hh_l0.stride() == (1, rows)
    _step_is_right(plain, model, rank)
    assert module.rnn.weight_hh_l0.grad.stride() == (1, rows)


@pytest.mark.parametrize("world_size", [2, 3])
@NUMBERS
def test_a_chunk_is_one_again_when_a_weight_took_rank_0s_strides(ranks, world_size, number):
    ranks(world_size, _quiet, _chunk_on_one_rank, number)


def _separate_weights(rank: int, number: int) -> None:
    """Each in a storage of its own, which nobody moves."""
    module = _model(number)
    places = [param.data_ptr() for param in module.parameters()]
    model = KnownDDP(module)
    model.load_state_dict(model.state_dict())
    _loss(model, rank).backward()
    assert [param.data_ptr() for param in module.parameters()] == places
    assert _storages(module.rnn) == len(list(module.rnn.parameters()))
    model.to(torch.float64)
    assert _storages(module.rnn) == len(list(module.rnn.parameters()))
    _check_lists(module.rnn)


@NUMBERS
def test_where_cudnn_does_not_apply_separate_weights_stay_where_they_are(ranks, number):
    ranks(2, _quiet, _separate_weights, number)


# -- chunks that cuDNN asks for


class _AsOnCuda(nn.LSTM):
    """Its ``flatten_parameters`` makes a chunk, as torch's does on CUDA: matrices of all layers, then biases."""

    made = 0

    def flatten_parameters(self) -> None:
        if not all(isinstance(weight, Tensor) for weight in self._flat_weights):
            return
        self.made += 1
        weights = [weight for dim in (2, 1) for weight in self._flat_weights if weight.dim() == dim]
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight in weights:
            place, flat = flat[: weight.numel()], flat[weight.numel() :]
            weight.data = place.view(weight.shape)


def _flattened_by_torch(rank: int, layers: int) -> None:
    """A deep copy has separate weights, and torch does not mend that; wrapping, and copying a wrapper, does."""
    copied = copy.deepcopy(_AsOnCuda(2, 3, num_layers=layers))
    assert _storages(copied) == 4 * layers
    made = copied.made
    model = KnownDDP(copied)
    assert is_flat(copied) and copied.made == made + 1
    assert is_flat(copy.deepcopy(model).module)
    again = copy.deepcopy(copied)
    assert not is_flat(again)
    assert is_flat(KnownDDP(again, init_sync=False).module)
    turned = copy.deepcopy(copied)
    if rank == 1:
        turned.weight_ih_l0.data = turned.weight_ih_l0.data.t().contiguous().t()
        with pytest.warns(UserWarning, match="other strides than on rank 0"):
            KnownDDP(turned)
    else:
        KnownDDP(turned)
    assert is_flat(turned)
    made = copied.made
    assert KnownDDP(copied).module.made == made  # it was one already


@pytest.mark.parametrize("layers", [1, 2])
def test_wrapping_makes_one_chunk_of_what_cudnn_would_run(ranks, layers):
    ranks(2, _flattened_by_torch, layers)


def _lay(weights: Iterable[nn.Parameter]) -> None:
    """One after the other, in one storage."""
    weights = list(weights)
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight in weights:
        place, flat = flat[: weight.numel()], flat[weight.numel() :]
        weight.data = place.view(weight.shape)


def _in_definition_order(rank: int) -> None:
    """Weights and biases layer by layer: for cuDNN that is no chunk unless there is one layer."""
    for layers, made in ((1, 0), (2, 1)):
        rnn = _AsOnCuda(2, 3, num_layers=layers)
        _lay(rnn.parameters())
        assert is_flat(rnn) is (layers == 1)
        rnn.made = 0
        KnownDDP(rnn)
        assert is_flat(rnn) and rnn.made == made
        _check_chunk(rnn)


def test_weights_in_another_order_are_no_chunk(ranks):
    ranks(2, _in_definition_order)


def test_an_rnn_stays_flat_when_loading_raises():
    """An extra key is found only when all others were assigned."""
    model = KnownDDP(nn.LSTM(2, 3), device_ids=["cpu", "cpu"])
    compact_parameters(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "more": torch.ones(1)}, assign=True)
    model(torch.ones(2, 2, 2))  # the RNN notices now that parameters were replaced
    _check_chunk(model.module)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_chunk_begins_where_its_storage_begins():
    """cuDNN looks for it there alone."""
    rnn = nn.RNN(2, 3)
    memory = torch.zeros(100)
    for begin, flat in ((0, True), (1, False)):
        place = begin
        for weight in rnn.parameters():
            weight.data = memory[place : place + weight.numel()].view(weight.shape)
            place += weight.numel()
        assert is_flat(rnn) is flat
    rnn.weight_hh_l0.data = rnn.weight_ih_l0.data.new_zeros(3, 3)
    assert not is_flat(rnn)


def test_weights_of_different_dtypes_or_on_the_meta_device_are_no_chunk():
    assert chunk_of(nn.GRU(2, 3)) is not None
    assert chunk_of(nn.GRU(2, 3, device="meta")) is None
    mixed = nn.GRU(2, 3)
    mixed.bias_hh_l0.data = mixed.bias_hh_l0.data.double()
    assert chunk_of(mixed) is None
    del mixed.bias_hh_l0
    assert chunk_of(mixed) is None
    twice = nn.RNN(3, 3)
    twice.weight_hh_l0 = twice.weight_ih_l0
    assert chunk_of(twice) is None
