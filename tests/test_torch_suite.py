"""torch's own tests of DistributedDataParallel, on KnownDDP; those that cannot pass are listed with the reason."""

from __future__ import annotations

import pytest
from ranks import RankPools
from torch_suite import TorchTest, find_tests, run, uses_rpc
from torch_suite_expected import OWN, expected_failures, judge

TESTS = find_tests()
LISTED = expected_failures("known")


def _param(test: TorchTest) -> object:
    return pytest.param(test, id=test.name, marks=[pytest.mark.slow] if uses_rpc(test) else [])


@pytest.mark.parametrize("test", [_param(test) for test in TESTS])
def test_of_torchs(test: TorchTest, pools: RankPools) -> None:
    kind, why = run(pools, test, "known")
    reason = LISTED.get(test.name)
    assert judge(kind, why, reason) != "unexpected", f"{kind}; listed: {reason}\n{why}"


@pytest.mark.parametrize("wrapper", OWN)
def test_torch_has_every_test_that_is_listed(wrapper: str) -> None:
    assert expected_failures(wrapper).keys() <= {test.name for test in TESTS}


def test_torchs_tests_are_found() -> None:
    assert len(TESTS) > 100
    assert len({test.name for test in TESTS}) == len(TESTS)
