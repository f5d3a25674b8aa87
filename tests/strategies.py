"""What generated tests draw from."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from knownddp.flat import row_major
from knownddp.specs import BucketKey, ParamSpec

CPU = torch.device("cpu")


def examples(number: int) -> settings:
    """So many examples, each of which may take its time: a shared machine may pause at any moment."""
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def spec(
    *shape: int, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None, is_sparse: bool = False
) -> ParamSpec:
    """A parameter on the CPU, row-major unless ``strides`` says otherwise."""
    numel = torch.Size(shape).numel()
    key = BucketKey(dtype, CPU)
    return ParamSpec("p", shape, strides or row_major(shape), numel, numel * dtype.itemsize, key, is_sparse)


param_specs = st.builds(
    lambda numel, dtype, is_sparse: spec(numel, dtype=dtype, is_sparse=is_sparse),
    numel=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    is_sparse=st.sampled_from([False, False, False, True]),
)
limits = st.lists(st.integers(0, 30), min_size=1, max_size=4)
# Parameters, and an order of launching them.
specs_and_order = st.lists(param_specs, min_size=1, max_size=7).flatmap(
    lambda specs: st.tuples(st.just(specs), st.permutations(range(len(specs))))
)
