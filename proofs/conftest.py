"""Claims asked for by name of this directory are checked in full; as part of all tests, in their short form."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def quick(pytestconfig: pytest.Config) -> bool:
    """Whether pytest was called without saying what to run."""
    return pytestconfig.args_source is not pytest.Config.ArgsSource.ARGS
