"""``compact_parameters``: where parameters lie afterwards, what stays, and what is left alone.

A float32 parameter begins at a multiple of 16 elements: 64 bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import inputs
from strategies import examples
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from knownddp import ArgumentError, compact_parameters


def offsets(module: nn.Module) -> list[int]:
    """Where each parameter begins in its storage, in elements."""
    return [int(param.storage_offset()) for param in module.parameters()]


def storages(module: nn.Module) -> list[int]:
    """The number of each parameter's storage, in order of appearance."""
    seen: dict[int, int] = {}
    return [seen.setdefault(p.untyped_storage().data_ptr(), len(seen)) for p in module.parameters()]


def reason(module: nn.Module, name: str) -> str:
    """Why ``name`` was left alone; every other parameter was not."""
    report = compact_parameters(module)
    assert [one for one, _ in report.left_alone] == [name]
    return report.left_alone[0][1]


def test_all_parameters_of_a_dtype_lie_in_one_storage_at_multiples_of_64_bytes():
    """Elements: weight 3 x 5 = 15 at 0, bias 3 at 16, weight 3 x 3 = 9 at 32, bias 3 at 48; all end at 64.

    Bytes: 30 elements of 64, so 34 * 4 = 136 of padding. The 17 doubles of 8 bytes end at 24: 7 * 8 = 56.
    """
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    module.register_parameter("wide", nn.Parameter(torch.ones(17, dtype=torch.float64)))
    report = compact_parameters(module)
    assert [name for name, _ in module.named_parameters()][:2] == ["wide", "0.weight"]
    assert offsets(module) == [0, 0, 16, 32, 48]
    assert storages(module) == [0, 1, 1, 1, 1]
    assert all(param.data_ptr() % 64 == 0 for param in module.parameters())
    assert dataclasses.astuple(report) == (30 * 4 + 17 * 8, 136 + 56, 2, ())
    assert pickle.loads(pickle.dumps(report)) == report


def test_padding_is_zero():
    """A storage may be sent, compared or hashed as it is."""
    module = nn.Linear(2, 2)
    compact_parameters(module)
    whole = torch.empty(0).set_(module.weight.untyped_storage())
    assert whole.tolist() == [*module.weight.flatten().tolist(), *[0] * 12, *module.bias.tolist(), *[0] * 14]


def test_called_again_it_does_nothing():
    module = nn.Sequential(nn.Linear(5, 3), nn.LSTM(3, 2), nn.Linear(3, 3, dtype=torch.float64))
    first = compact_parameters(module)
    places = [param.data_ptr() for param in module.parameters()]
    assert compact_parameters(module) == dataclasses.replace(first, bytes_moved=0)
    assert [param.data_ptr() for param in module.parameters()] == places


def test_a_parameter_that_came_later_brings_the_others_of_its_dtype_to_a_new_storage():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    compact_parameters(module)
    module[0].extra = nn.Parameter(torch.ones(3))
    assert compact_parameters(module).bytes_moved == (4 + 2 + 3) * 4
    assert storages(module) == [0, 0, 0, 1, 1]


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Parameters of any shapes, of size 0 too, with their dimensions in any order in memory."""
    module = nn.Module()
    for number in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        order = draw(st.permutations(range(len(shape))))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.uint8]))
        values = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)
        turned = values.permute(order).clone(memory_format=torch.contiguous_format)
        turned = turned.permute([order.index(d) for d in range(len(shape))])
        param = nn.Parameter(turned, requires_grad=dtype is not torch.uint8)
        if param.requires_grad:
            param.grad = torch.ones_like(param)
        module.register_parameter(f"p{number}", param)
    return module


@examples(60)
@given(module=modules())
def test_values_strides_identity_and_gradients_stay(module):
    objects, wanted = list(module.parameters()), copy.deepcopy(module)
    grads = [param.grad for param in objects]
    strides = [param.stride() for param in objects]
    report = compact_parameters(module)
    assert not report.left_alone
    assert all(now is before for now, before in zip(module.parameters(), objects, strict=True))
    assert all(torch.equal(now, want) for now, want in zip(module.parameters(), wanted.parameters(), strict=True))
    assert [param.stride() for param in module.parameters()] == strides
    assert all(param.grad is grad for param, grad in zip(objects, grads, strict=True))
    assert report.storages == len({param.dtype for param in objects})
    assert len({(param.dtype, param.untyped_storage().data_ptr()) for param in objects}) == report.storages
    assert compact_parameters(module) == dataclasses.replace(report, bytes_moved=0)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=str)
def test_training_goes_on_to_the_last_bit(options):
    """Optimizer state, hooks and tied parameters go on with the same Parameter objects."""

    def train(compacts: bool) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
        module[3].weight = module[0].weight
        fired: list[int] = []
        module[0].weight.register_hook(lambda grad: fired.append(0))
        module[2].bias.register_post_accumulate_grad_hook(lambda param: fired.append(1))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
        for step in range(4):
            if step == 2 and compacts:
                assert compact_parameters(module).storages == 1
                assert module[3].weight is module[0].weight
            optimizer.zero_grad()
            module(inputs(0, 5, 4, seed=step)).square().mean().backward()
            optimizer.step()
        return [param.detach() for param in module.parameters()], fired

    (ours, fired), (wanted, fired_without) = train(True), train(False)
    assert all(torch.equal(now, want) for now, want in zip(ours, wanted, strict=True))
    assert sorted(fired) == sorted(fired_without) == [0] * 4 + [1] * 4


def test_state_dict_is_the_same_and_loads():
    module = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3))
    before = copy.deepcopy(module.state_dict())
    compact_parameters(module)
    after = module.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    places = [param.data_ptr() for param in module.parameters()]
    module.load_state_dict({name: value + 1 for name, value in before.items()})
    assert [param.data_ptr() for param in module.parameters()] == places
    assert torch.equal(module[0].weight, before["0.weight"] + 1)


# -- what is left alone


def test_a_view_of_a_larger_tensor_is_left_alone_while_that_lives():
    flat = torch.arange(20.0)
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(flat[4:8].view(2, 2))
    assert reason(module, "weight") == "1 more tensors lie in its storage"
    flat.zero_()
    assert module.weight.sum() == 0
    del flat
    assert compact_parameters(module).left_alone == ()


def test_a_buffer_over_a_parameters_memory_keeps_it_there():
    module = nn.Linear(2, 2)
    module.register_buffer("again", module.weight.detach())
    assert reason(module, "weight") == "1 more tensors lie in its storage"


def test_parameters_that_share_memory_are_left_alone_together():
    """b lies inside a, c does too but not where b does, d lies behind them."""
    module = nn.Module()
    memory = torch.arange(10.0)
    for name, part in {"d": memory[8:], "c": memory[4:6], "a": memory[:8], "b": memory[1:3]}.items():
        module.register_parameter(name, nn.Parameter(part))
    del memory, part
    assert compact_parameters(module).left_alone == (
        ("c", "it shares memory with a"),
        ("a", "it shares memory with b"),
        ("b", "it shares memory with a"),
    )
    assert module.a[1:3].tolist() == module.b.tolist() and module.a[4:6].tolist() == module.c.tolist()


class _Parameter(nn.Parameter):
    pass


class _Tensor(torch.Tensor):
    """A parameter made of one has its class, as with DTensor."""


def _shared_between_processes() -> Tensor:
    return torch.ones(3).share_memory_()


def _made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: _Parameter(torch.ones(3)), "it is a tensor subclass, _Parameter"),
        (lambda: torch.ones(3).as_subclass(_Tensor), "it is a tensor subclass, _Tensor"),
        (lambda: nn.UninitializedParameter(), "it is not initialised yet"),
        (lambda: torch.ones(3, device="meta"), "it is on the meta device"),
        (lambda: torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
        (lambda: torch.ones(3, 1).expand(3, 2), "its elements do not lie densely: shape (3, 2), strides (1, 0)"),
        (lambda: torch.ones(3, 4)[:, :2], "its elements do not lie densely: shape (3, 2), strides (4, 1)"),
        (lambda: torch.from_numpy(np.ones(3)), "its memory is not torch's own: a numpy array, say, or a mapped file"),
        (_shared_between_processes, "it is in memory that processes share"),
        (_made_in_inference_mode, "it was made in inference mode"),
    ],
)
def test_what_is_no_plain_dense_tensor_of_its_own_is_left_alone(make, why):
    made = make()
    param = made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=not made.is_inference())
    module = nn.Linear(2, 2)
    module.odd = param
    del made
    assert reason(module, "odd") == why
    assert module.odd is param
    assert storages(nn.ParameterList([module.weight, module.bias])) == [0, 0]


def test_a_module_without_parameters_has_nothing_to_compact():
    assert dataclasses.astuple(compact_parameters(nn.ReLU())) == (0, 0, 0, ())


# -- recurrent layers

# Offsets worked out from the shapes, in the order of ``parameters()``; matrices of all layers come first, then biases.
RNNS: Sequence[tuple[Callable[[], nn.RNNBase], list[int], int]] = [
    # 12 x 2, 12 x 3, 12, 12
    (lambda: nn.LSTM(2, 3), [0, 24, 60, 72], 84),
    # 3 x 2, 3 x 3
    (lambda: nn.RNN(2, 3, bias=False), [0, 6], 15),
    # 9 x 2, 9 x 3 twice: 90; 9 x 6, 9 x 3 twice: 252; eight biases of 9
    (
        lambda: nn.GRU(2, 3, num_layers=2, bidirectional=True),
        [0, 18, 252, 261, 45, 63, 270, 279, 90, 144, 288, 297, 171, 225, 306, 315],
        324,
    ),
    # 16 x 2, 16 x 3, the projection 3 x 4 last among the matrices, 16, 16
    (lambda: nn.LSTM(2, 4, proj_size=3), [0, 32, 92, 108, 80], 124),
    (lambda: nn.LSTM(2, 4, proj_size=3, bias=False), [0, 32, 80], 92),
]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("make", "wanted", "numel"), RNNS)
def test_the_weights_of_an_rnn_are_one_chunk_in_a_storage_of_their_own(make, wanted, numel):
    rnn = make()
    x = inputs(0, 4, 1, 2)
    before = rnn(x)[0]
    module = nn.Sequential(nn.Linear(2, 2), rnn, nn.Linear(2, 2))
    del before  # it holds views of the weights for a backward
    before = rnn(x)[0].detach()
    report = compact_parameters(module)
    assert offsets(rnn) == wanted
    assert storages(module) == [0, 0, *[1] * len(wanted), 0, 0]
    assert rnn.weight_ih_l0.untyped_storage().nbytes() == 4 * numel
    assert all(weight is param for weight, param in zip(rnn._flat_weights, rnn.parameters(), strict=True))
    assert (report.bytes_moved, report.bytes_of_padding, report.storages) == (4 * (12 + numel), 4 * (64 - 12), 2)
    assert torch.equal(rnn(x)[0], before)
    assert compact_parameters(module) == dataclasses.replace(report, bytes_moved=0)


def test_an_rnn_whose_weights_are_computed_from_others_is_no_chunk():
    """They are parameters like others: all in one storage."""
    rnn = parametrizations.weight_norm(nn.GRU(2, 3), "weight_hh_l0")
    with torch.no_grad():
        rnn(inputs(0, 4, 1, 2))  # until then it holds the weight from before
    assert compact_parameters(rnn).storages == 1
    assert storages(rnn) == [0] * 5


def test_of_two_rnns_that_share_a_weight_the_first_is_the_chunk():
    first, second = nn.RNN(3, 3), nn.RNN(3, 3)
    second.weight_hh_l0 = first.weight_hh_l0
    both = nn.ModuleList([first, second])
    assert compact_parameters(both).storages == 2
    assert storages(both) == [0, 0, 0, 0, 1, 1, 1]
    assert second._flat_weights[1] is first.weight_hh_l0


def test_turned_weights_of_an_rnn_stay_turned_in_the_chunk():
    """12 x 2 stored by columns, strides (1, 12)."""
    rnn = nn.LSTM(2, 3)
    x, wanted = inputs(0, 4, 1, 2), copy.deepcopy(rnn)
    rnn.weight_ih_l0.data = rnn.weight_ih_l0.data.t().contiguous().t()
    compact_parameters(rnn)
    assert offsets(rnn) == [0, 24, 60, 72] and rnn.weight_ih_l0.stride() == (1, 12)
    torch.testing.assert_close(rnn(x)[0], wanted(x)[0])


@pytest.mark.parametrize("thing", [{}, [], nn.Parameter(torch.ones(1))])
def test_only_a_module_can_be_compacted(thing):
    with pytest.raises(ArgumentError, match="takes a module, got"):
        compact_parameters(thing)
