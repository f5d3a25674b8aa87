"""Splitting inputs and joining outputs. On the CPU, where the devices of all replicas are one."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from knownddp import ReplicaError, UsageError
from knownddp.scattering import gather, scatter

CPU = torch.device("cpu")


def split(*args: Any, replicas: int = 2, dim: int = 0, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return scatter(args, kwargs, [CPU] * replicas, dim)


def split_one(value: Any, replicas: int = 2, dim: int = 0) -> list[Any]:
    return [args[0] for args, _ in split(value, replicas=replicas, dim=dim)]


def join(*outputs: Any, dim: int = 0) -> Any:
    return gather(outputs, CPU, dim)


def same(ours: Any, theirs: Any) -> bool:
    """Equal, types and tensors included."""
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    value: Any
    name: str = "r"


@dataclass
class Slotted:
    __slots__ = ("value",)
    value: Any


# -- splitting


@given(rows=st.integers(1, 12), replicas=st.integers(1, 5), dim=st.sampled_from([0, 1, -1, -2]))
@examples(60)
def test_rows_are_split_as_torch_chunk_does(rows, replicas, dim):
    shape = [2, 2]
    shape[dim] = rows
    x = torch.arange(2.0 * rows).reshape(shape)
    assert same(split_one(x, replicas, dim), list(x.chunk(replicas, dim)))


def test_fewer_rows_than_devices_make_fewer_replicas_and_none_make_one():
    assert [part.tolist() for part in split_one(torch.tensor([1, 2]), replicas=3)] == [[1], [2]]
    assert [part.shape for part in split_one(torch.zeros(0, 3), replicas=3)] == [(0, 3)]


def test_no_arguments_make_one_replica():
    assert split(replicas=3) == [((), {})]


def test_arguments_without_tensors_go_to_every_replica_as_they_are():
    options = {"depth": [1, 2], "name": "x"}
    given_to = split(3, options, replicas=3, flag=None)
    assert len(given_to) == 3
    assert all(args == (3, options) and args[1] is options and kwargs == {"flag": None} for args, kwargs in given_to)


def test_named_arguments_are_split_too():
    first, second = split(torch.tensor([1, 2, 3]), mask=torch.tensor([4, 5, 6]))
    assert same(first, ((torch.tensor([1, 2]),), {"mask": torch.tensor([4, 5])}))
    assert same(second, ((torch.tensor([3]),), {"mask": torch.tensor([6])}))


def test_tensors_without_rows_go_to_every_replica():
    """One without dimensions, one without dimension 1, and one that has size 1 where the batch has 4."""
    x, scalar, row = torch.zeros(2, 4), torch.tensor(2.0), torch.arange(3)
    wide = torch.ones(5, 1)
    for args, _ in split(x, scalar, row, wide, dim=1):
        assert args[0].shape == (2, 2)
        assert same(args[1:], (scalar, row, wide))


def test_structures_keep_their_types():
    x = torch.tensor([1, 2])
    ordered = collections.OrderedDict(b=x, a="kept")
    counted = collections.defaultdict(list, {"x": x})
    users = collections.UserDict(x=x)
    nested = {1: [x, (x, "text")], "pair": Pair(x, None), "record": Record(x)}
    for row, parts in zip([[1], [2]], split_one((ordered, counted, users, nested, Slotted(x))), strict=True):
        part = torch.tensor(row)
        assert same(parts[0], collections.OrderedDict(b=part, a="kept"))
        assert parts[1]["x"].tolist() == row and parts[1].default_factory is list
        assert type(parts[2]) is collections.UserDict and parts[2]["x"].tolist() == row
        assert same(parts[3][1], [part, (part, "text")])
        assert same(parts[3]["pair"], Pair(part, None))
        assert type(parts[3]["record"]) is Record
        assert parts[3]["record"].value.tolist() == row and parts[3]["record"].name == "r"
        assert parts[4].value.tolist() == row
    assert users["x"] is x and nested["pair"].left is x  # what was given is not changed


def test_objects_that_are_not_looked_into_are_shared():
    hidden = SimpleNamespace(x=torch.zeros(4))
    (first, _), (second, _) = split(torch.zeros(2), hidden)
    assert first[1] is second[1] is hidden


def test_the_first_replica_has_a_view_and_the_others_have_copies():
    """As on several devices: written in place, the first part reaches the caller's tensor and the others do not."""
    x = torch.zeros(4)
    first, second = split_one(x)
    first.add_(1)
    second.add_(2)
    assert x.tolist() == [1, 1, 0, 0]


def test_gradients_go_back_through_the_split():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    first, second = split_one(x)
    (2 * first.sum() + 3 * second.sum()).backward()
    assert x.grad.tolist() == [2, 2, 3]


def test_tensors_that_disagree_about_rows_are_refused_by_name():
    with pytest.raises(UsageError) as caught:
        split(torch.zeros(8, 2), {"ids": [torch.zeros(5)]}, mask=torch.zeros(1, 2))
    assert isinstance(caught.value, (ReplicaError, RuntimeError))
    message = str(caught.value)
    assert 'args[0] has 8, args[1]["ids"][0] has 5' in message and "mask" not in message and "Fix: " in message


# -- joining


def test_tensors_are_joined_along_the_dimension():
    a, b = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    assert join(a, b).tolist() == [[1, 2], [3, 4]]
    assert join(a, b, dim=1).tolist() == [[1, 2, 3, 4]]
    assert join(a, b, dim=-1).tolist() == [[1, 2, 3, 4]]


def test_uneven_parts_are_joined():
    assert join(torch.zeros(2, 3), torch.zeros(1, 3)).shape == (3, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_losses_become_a_vector_also_from_one_replica(dim):
    assert join(torch.tensor(1.0), torch.tensor(2.0), dim=dim).tolist() == [1, 2]
    assert join(torch.tensor(1.0), dim=dim).tolist() == [1]


def test_a_vector_of_losses_leads_back_to_each():
    a, b = (torch.tensor(1.0, requires_grad=True) for _ in range(2))
    (join(a, b) * torch.tensor([2.0, 3.0])).sum().backward()
    assert (a.grad.item(), b.grad.item()) == (2, 3)


def test_structures_are_joined_part_by_part():
    def output(row: int) -> dict[str, Any]:
        x = torch.tensor([row])
        return {"logits": [x, (x, None)], "pair": Pair(x, "same"), "record": Record(x), "count": 3, 7: x}

    joined, x = join(output(1), output(2)), torch.tensor([1, 2])
    assert same(joined["logits"], [x, (x, None)])
    assert same(joined["pair"], Pair(x, "same"))
    assert joined["record"].value.tolist() == [1, 2] and joined["record"].name == "r"
    assert joined["count"] == 3 and joined[7].tolist() == [1, 2]


def test_dictionaries_may_be_filled_in_any_order():
    joined = join({"a": torch.tensor([1]), "b": torch.tensor([2])}, {"b": torch.tensor([4]), "a": torch.tensor([3])})
    assert same(joined, {"a": torch.tensor([1, 3]), "b": torch.tensor([2, 4])})


def test_what_max_returns_is_joined():
    values, indices = torch.tensor([[1.0, 5.0], [7.0, 2.0]]).max(1)
    joined = join(*(torch.tensor([row]).max(1) for row in [[1.0, 5.0], [7.0, 2.0]]))
    assert type(joined) is torch.return_types.max
    assert same(tuple(joined), (values, indices))


@pytest.mark.parametrize("value", [None, True, 2.5, "text", (), [], {}, torch.float32])
def test_equal_objects_are_returned_as_they_are(value):
    assert same(join(value, value), value)


EQUAL = [
    (float("nan"), float("nan")),
    (complex(1, float("nan")), complex(1, float("nan"))),
    (np.float32("nan"), np.float32("nan")),
    (np.arange(2), np.arange(2)),
    (np.array([1, float("nan")]), np.array([1, float("nan")])),
    (np.array(["a"]), np.array(["a"])),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_arrays_are_compared_by_their_elements_and_what_is_no_number_is_equal(one, other):
    assert one is not other and join({"n": one}, {"n": other})["n"] is one


DIFFERENT = [
    (1, 2),
    ("a", "b"),
    (1.0, float("nan")),
    (float("nan"), 1.0),
    (np.arange(2), np.arange(3)),
    (np.arange(2), np.arange(2.0)),
    (np.arange(2), np.array([0, 2])),
    (object(), object()),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_objects_that_differ_are_refused(one, other):
    with pytest.raises(ReplicaError, match=r'output\["n"\] is no tensor and differs between replicas: .* on replica 1'):
        join({"n": one}, {"n": other})


BAD = [
    ([torch.zeros(2, 7)], [torch.zeros(2, 9)], "output[0] has size 9 in dimension 1 on replica 1, and 7 on replica 0"),
    (torch.zeros(2, 7), torch.zeros(2), "output has 1 dimensions on replica 1, [2], and 2 on replica 0, [2, 7]"),
    (torch.zeros(2), None, "output is of type NoneType on replica 1 and Tensor on replica 0"),
    ((1,), [1], "output is of type list on replica 1 and tuple on replica 0"),
    ([1], [1, 1], "output holds 2 parts on replica 1, ['[0]', '[1]'], and 1 on replica 0"),
    ({"a": 1}, {"b": 1}, "output holds 1 parts on replica 1, ['[\"b\"]'], and 1 on replica 0, ['[\"a\"]']"),
]


@pytest.mark.parametrize(("one", "other", "says"), BAD)
def test_outputs_that_cannot_be_joined_are_refused(one, other, says):
    with pytest.raises(ReplicaError) as caught:
        join(one, other)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [Tensor.to_sparse, lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged)],
    ids=["coo", "jagged"],
)
def test_sparse_and_nested_tensors_are_refused_by_name_where_they_would_be_split_or_joined(make):
    odd = make(torch.ones(2, 2))
    with pytest.raises(ReplicaError, match=r'args\[0\]\["x"\] cannot be split over replicas: it is sparse or nested'):
        split({"x": odd})
    assert split(torch.ones(1, 2), odd, replicas=1)[0][0][1] is odd  # as a whole it may go
    with pytest.raises(ReplicaError, match=r'output\["x"\] cannot be joined: it is sparse or nested'):
        join({"x": odd}, {"x": odd})


def test_a_dimension_that_outputs_lack_is_refused():
    with pytest.raises(ReplicaError, match="output has no dimension 1 to be joined along"):
        join(torch.zeros(2), torch.zeros(2), dim=1)


def test_a_size_that_differs_names_the_usual_cause():
    with pytest.raises(ReplicaError) as caught:
        join({"logits": [0, torch.zeros(1, 3)]}, {"logits": [0, torch.zeros(1, 3)]}, {"logits": [0, torch.zeros(1, 5)]})
    assert 'output["logits"][1] has size 5 in dimension 1 on replica 2' in str(caught.value)
    assert "pad_packed_sequence(..., total_length=n)" in str(caught.value)


# -- packed sequences


def sequences(lengths: list[int]) -> list[Tensor]:
    """Sequence j holds 100 j, 100 j + 1, and so on."""
    return [100.0 * j + torch.arange(length).unsqueeze(1) for j, length in enumerate(lengths)]


def assert_same_packed(ours: PackedSequence, theirs: PackedSequence) -> None:
    assert ours.batch_sizes.tolist() == theirs.batch_sizes.tolist()
    assert ours.data.tolist() == theirs.data.tolist()
    for mine, other in ((ours.sorted_indices, theirs.sorted_indices), (ours.unsorted_indices, theirs.unsorted_indices)):
        assert (mine is None) == (other is None) and (mine is None or mine.tolist() == other.tolist())


lengths_and_replicas = st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(1, 4))


@given(drawn=lengths_and_replicas)
@examples(100)
def test_a_packed_sequence_is_split_into_what_packing_the_parts_gives(drawn):
    lengths, replicas = drawn
    whole = sequences(lengths)
    parts = split_one(rnn.pack_sequence(whole, enforce_sorted=False), replicas)
    step = -(-len(whole) // replicas)
    wanted = [whole[start : start + step] for start in range(0, len(whole), step)]
    assert len(parts) == len(wanted)
    for part, want in zip(parts, wanted, strict=True):
        unpacked = rnn.unpack_sequence(part)
        assert [one.tolist() for one in unpacked] == [one.tolist() for one in want]
        assert part.batch_sizes.tolist() == rnn.pack_sequence(want, enforce_sorted=False).batch_sizes.tolist()


@given(drawn=lengths_and_replicas)
@examples(100)
def test_joining_what_was_split_gives_the_packed_sequence_again(drawn):
    lengths, replicas = drawn
    packed = rnn.pack_sequence(sequences(lengths), enforce_sorted=False)
    joined = join(*split_one(packed, replicas))
    assert [one.tolist() for one in rnn.unpack_sequence(joined)] == [one.tolist() for one in sequences(lengths)]
    assert joined.batch_sizes.tolist() == packed.batch_sizes.tolist()


@given(drawn=lengths_and_replicas)
@examples(100)
def test_sorted_ones_without_indices_stay_so(drawn):
    lengths, replicas = sorted(drawn[0], reverse=True), drawn[1]
    whole = sequences(lengths)
    parts, step = split_one(rnn.pack_sequence(whole), replicas), -(-len(whole) // replicas)
    for start, part in zip(range(0, len(whole), step), parts, strict=True):
        assert_same_packed(part, rnn.pack_sequence(whole[start : start + step]))
    assert_same_packed(join(*parts), rnn.pack_sequence(whole))


def test_sorted_parts_that_are_not_sorted_together_get_indices():
    """Lengths 1 and 2: the second comes first."""
    short, long = sequences([1, 2])
    joined = join(rnn.pack_sequence([short]), rnn.pack_sequence([long]))
    assert joined.sorted_indices.tolist() == [1, 0]
    assert [one.flatten().tolist() for one in rnn.unpack_sequence(joined)] == [[0], [100, 101]]


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_that_goes_to_every_replica_is_copied_for_all_but_the_first(enforce_sorted):
    """One sequence, where the batch has four rows; replicas may write to what they were given."""
    packed = rnn.pack_sequence(sequences([3]), enforce_sorted=enforce_sorted)
    (first, _), (second, _) = split(packed, torch.zeros(4))
    assert first[0] is packed
    assert_same_packed(second[0], packed)
    mine = {tensor.data_ptr() for tensor in packed if tensor is not None}
    assert len(mine) == (2 if enforce_sorted else 4)
    assert mine.isdisjoint(tensor.data_ptr() for tensor in second[0] if tensor is not None)


def test_gradients_go_back_through_packed_sequences():
    """The sum of i times the i-th element of the padded batch, in the order of the sequences."""
    data = torch.arange(6.0).requires_grad_()
    packed = PackedSequence(data, torch.tensor([3, 2, 1]))
    weights = torch.arange(1.0, 7.0)
    (join(*split_one(packed)).data * weights).sum().backward()
    assert data.grad.tolist() == weights.tolist()


def test_packed_sequences_are_counted_beside_tensors():
    packed = rnn.pack_sequence(sequences([2, 1, 3]), enforce_sorted=False)
    (first, _), (second, _) = split(packed, torch.arange(3))
    assert (first[0].batch_sizes[0].item(), first[1].tolist()) == (2, [0, 1])
    assert (second[0].batch_sizes[0].item(), second[1].tolist()) == (1, [2])
    with pytest.raises(ReplicaError, match=r"args\[0\] has 3, args\[1\] has 4"):
        split(packed, torch.arange(4))


def test_packed_sequences_whose_features_differ_are_refused():
    with pytest.raises(ReplicaError, match=r"output\.data has size 2 in dimension 1 on replica 1"):
        join(rnn.pack_sequence([torch.zeros(2, 1)]), rnn.pack_sequence([torch.zeros(2, 2)]))
