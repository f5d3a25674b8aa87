"""Ranks as generators that meet: each yields what it has to say, and is sent what all of them said."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


def meet(ranks: Sequence[Generator[S, list[S], R]]) -> list[R]:
    """Go through all of them, from meeting to meeting. Returns what they return, by rank.

    Raises:
        AssertionError: some go to a meeting that others do not go to.
    """
    heard: list[S] | None = None
    while True:
        said: list[S] = []
        returned: list[R] = []
        for rank in ranks:
            try:
                said.append(next(rank) if heard is None else rank.send(heard))
            except StopIteration as stop:
                returned.append(stop.value)
        assert not (said and returned), "the script has another number of windows on some rank"
        if returned or not ranks:
            return returned
        heard = said
