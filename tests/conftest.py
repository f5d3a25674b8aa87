"""The ``ranks`` fixture: run a function on started processes, one a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks import RankPools


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """The processes, shared by all tests."""
    started = RankPools()
    yield started
    started.stop()


@pytest.fixture
def ranks(pools: RankPools) -> Callable[..., list[Any]]:
    """``ranks(world_size, fn, *args)`` calls ``fn(rank, *args)`` on every rank and returns the results in rank order.

    The processes are shared by all tests. After each call the ranks check that their process group still works; after
    an exception, a death or a hang, which fail the test with every rank's traceback or stack, they are replaced.
    """
    return pools.run
