"""Finding tensors in what a module returns, and converting those in what it is given."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from knownddp.outputs import MAX_DEPTH, MAX_OBJECTS, find_tensors, to_device, to_dtype

A, B, C = (torch.tensor(float(i)) for i in range(3))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    loss: Tensor | None
    rest: object = None
    never_set: Tensor = field(init=False)


class Plain:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


def found(output: object) -> tuple[list[int], bool]:
    """Which of A, B, C were found, in order of their values, and whether something is hidden."""
    tensors, is_hidden = find_tensors(output)
    assert all(any(t is one for one in (A, B, C)) for t in tensors)
    return sorted(int(t) for t in tensors), is_hidden


@pytest.mark.parametrize(
    "output",
    [
        pytest.param((A, B, C), id="tuple"),
        pytest.param([A, B, C], id="list"),
        pytest.param({A, frozenset({B, C})}, id="sets"),
        pytest.param({"a": A, "b": [B, {"c": C}]}, id="dicts"),
        pytest.param(MappingProxyType({"a": A, "b": B, "c": C}), id="a mapping that is no dict"),
        pytest.param(Pair(A, Pair(B, C)), id="named tuples"),
        pytest.param(Output(A, rest=[Output(None), Output(B), Output(C)]), id="dataclasses with None"),
        pytest.param(Plain(a=A, b=Plain(b=B), c=(C,)), id="objects"),
        pytest.param([A, Slotted(B), C], id="slots"),
        pytest.param(
            [A, [B, [C, "text", b"bytes", 1, 2.0, 3j, True, None, torch.float32, torch.Size([2])]]], id="mixed"
        ),
    ],
)
def test_every_tensor_is_found_and_nothing_is_hidden(output):
    assert found(output) == ([0, 1, 2], False)


def test_a_tensor_itself_is_an_output():
    assert found(B) == ([1], False)


def test_the_data_of_a_packed_sequence_is_found():
    packed = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    tensors, is_hidden = find_tensors([packed])
    assert tensors[0] is packed.data and not is_hidden


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(lambda: B, id="lambda"),
        pytest.param(nn.Linear(1, 1), id="module"),
        pytest.param(Plain, id="class"),
        pytest.param(iter([B]), id="iterator"),
    ],
)
def test_what_cannot_be_looked_into_is_hidden_and_the_rest_is_found(closed):
    assert found([A, closed, C]) == ([0, 2], True)


def test_cycles_end():
    knot: list[object] = [A]
    knot.append({"back": knot, "object": Plain(knot=knot, tensor=B)})
    assert found(knot) == ([0, 1], False)


def nested(depth: int) -> object:
    value: object = A
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_limited_and_what_lies_deeper_is_hidden():
    assert found(nested(MAX_DEPTH)) == ([0], False)
    assert found(nested(MAX_DEPTH + 1)) == ([], True)


def test_the_number_of_containers_is_limited_and_what_lies_in_others_is_hidden():
    """The outer list counts too."""
    inner = [[A], *([] for _ in range(MAX_OBJECTS - 3)), [B]]
    assert found(inner) == ([0, 1], False)
    assert found([*inner, [C]]) == ([0, 1], True)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_outputs_die_without_the_garbage_collector():
    output = [torch.ones(1), {"more": Plain(tensor=torch.ones(1))}]
    tensors, _ = find_tensors(output)
    watched = [weakref.ref(t) for t in tensors]
    assert [ref() is not None for ref in watched] == [True, True]
    del output, tensors
    assert [ref() for ref in watched] == [None, None]


# -- moving: to the device "meta", so that a move shows

META = torch.device("meta")


class Row(list):
    """A list of a type of its own."""


def test_to_device_moves_every_tensor_and_keeps_structure_and_types():
    other = Plain(tensor=A)
    value = (A, [B, Pair(C, "text")], Row([A]), {"b": B, "c": collections.OrderedDict(c=C)}, torch.Size([2]), 7, other)
    moved = to_device(value, META)

    tensor, listed, row, mapping, size, number, passed = moved
    assert (type(moved), type(listed), type(listed[1]), type(row)) == (tuple, list, Pair, Row)
    assert (type(mapping), type(mapping["c"])) == (dict, collections.OrderedDict)
    tensors = [tensor, listed[0], listed[1].left, row[0], mapping["b"], mapping["c"]["c"]]
    assert [t.device for t in tensors] == [META] * 6
    assert listed[1].right == "text" and list(mapping) == ["b", "c"]
    assert (size, number) == (torch.Size([2]), 7) and type(size) is torch.Size
    assert passed is other and other.tensor is A


def test_to_device_moves_a_packed_sequence_as_one():
    """``batch_sizes`` stays on the CPU, which is why its members are not moved one by one."""
    moved = to_device([pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])], META)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META and moved.batch_sizes.device.type == "cpu"


def test_to_device_leaves_alone_what_is_there_already():
    assert to_device(A, torch.device("cpu")) is A


# -- casting


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    weights: Tensor
    again: Any = field(init=False)
    missing: Tensor = field(init=False)


def test_to_dtype_casts_floating_point_tensors_alone():
    kinds = (torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
    value = {"all": Pair([torch.ones(2, dtype=kind) for kind in kinds], "text"), "number": 1.5}
    cast = to_dtype(value, torch.bfloat16)
    assert type(cast["all"]) is Pair and cast["all"].right == "text" and cast["number"] == 1.5
    assert [t.dtype for t in cast["all"].left] == [*[torch.bfloat16] * 3, *kinds[3:]]


def test_to_dtype_looks_into_dataclasses_without_making_them_anew():
    """``again`` is no argument of the constructor, and ``missing`` was never set."""
    batch = Batch(torch.tensor([1]), torch.ones(2))
    object.__setattr__(batch, "again", [torch.ones(3)])
    cast = to_dtype((batch,), torch.float16)[0]
    assert type(cast) is Batch and cast is not batch
    assert (cast.weights.dtype, cast.again[0].dtype) == (torch.float16, torch.float16)
    assert cast.tokens is batch.tokens and batch.weights.dtype == torch.float32
    assert not hasattr(cast, "missing")
    assert to_dtype(Batch, torch.float16) is Batch


def test_to_dtype_casts_packed_sequences():
    for kind, wanted in [(torch.float32, torch.float16), (torch.int64, torch.int64)]:
        packed = pack_sequence([torch.ones(1, dtype=kind), torch.ones(2, dtype=kind)], enforce_sorted=False)
        cast = to_dtype([packed], torch.float16)[0]
        assert isinstance(cast, PackedSequence) and cast.data.dtype == wanted
        assert (cast.batch_sizes.tolist(), cast.sorted_indices.tolist()) == ([2, 1], [1, 0])


def test_to_dtype_keeps_the_way_back_to_the_tensor():
    x = torch.ones(2, requires_grad=True)
    to_dtype({"x": x}, torch.bfloat16)["x"].sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.tolist() == [1, 1]
    assert to_dtype(x, torch.float32) is x
