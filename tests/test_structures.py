"""Containers taken apart and put together again."""

from __future__ import annotations

import collections
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from knownddp.structures import contents_of, leaves_of, parts_of, rebuilt


class Batch(MutableMapping[str, Any]):
    """A mapping whose shallow copies share its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class TwoOfThem(list[Any]):
    """Its constructor takes other arguments than a list's."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__([one, other])
        self.mark = "kept"


class TaggedPair(tuple[Any, ...]):
    def __new__(cls, one: Any, other: Any) -> TaggedPair:
        made = super().__new__(cls, (one, other))
        made.mark = "kept"
        return made


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    value: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


def test_a_mapping_that_shares_its_items_with_copies_is_not_changed():
    old = torch.zeros(2, requires_grad=True) * 2  # one that cannot be deep-copied
    batch = Batch({"x": old, "y": old})
    made = rebuilt(batch, [1, 2])
    assert type(made) is Batch and dict(made) == {"x": 1, "y": 2}  # though both were one object
    assert batch["x"] is old and batch["y"] is old


def test_no_constructor_is_called():
    made = rebuilt(TwoOfThem(1, 2), [3, 4])
    assert type(made) is TwoOfThem and made == [3, 4] and made.mark == "kept"
    pair = rebuilt(TaggedPair(1, 2), [3, 4])
    assert type(pair) is TaggedPair and pair == (3, 4) and pair.mark == "kept"


def test_tuples_of_all_kinds():
    assert rebuilt((1, 2), [3, 4]) == (3, 4)
    point = rebuilt(Point(1, 2), [3, 4])
    assert type(point) is Point and point == (3, 4)
    largest = torch.tensor([1, 3]).max(0)
    assert type(rebuilt(largest, [5, 6])) is type(largest) and tuple(rebuilt(largest, [5, 6])) == (5, 6)


def test_what_a_dataclass_was_given_beside_its_fields_counts():
    record = Record(1)
    record.later = 2
    assert parts_of(record) == [(".value", 1), (".later", 2)]
    made = rebuilt(record, [3, 4])
    assert (made.value, made.later) == (3, 4) and (record.value, record.later) == (1, 2)
    assert rebuilt(Frozen(1), [2]) == Frozen(2)


def test_dictionaries_keep_their_kind():
    counted = collections.defaultdict(list, a=1)
    made = rebuilt(counted, [2])
    assert made == {"a": 2} and made.default_factory is list and counted == {"a": 1}


def test_leaves_are_named_by_the_way_to_them():
    value = {"a": [1, Point(2, (3,))], 4: Record(5)}
    assert list(leaves_of(value, "v")) == [
        ('v["a"][0]', 1),
        ('v["a"][1].x', 2),
        ('v["a"][1].y[0]', 3),
        ("v[4].value", 5),
    ]


def test_what_is_no_container_has_no_contents():
    assert [contents_of(value) for value in (1, "text", {1}, Record, torch.nn.Linear(1, 1))] == [None] * 5
