"""How gradients travel: in which dtype, which of them last, in buckets of which sizes.

Expected values are worked out in the docstring.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, make, raises_everywhere
from steps import setups, steps_are_right
from torch import Tensor, nn
from torch.futures import Future

from knownddp import ArgumentError, KnownDDP, RanksDifferError, UnknownParameterError
from knownddp.options import default_cap_bytes

BYTE = 2.0**-20  # in MiB


def _travels(model: KnownDDP) -> list[list[str]]:
    """The names in each bucket from now on, by a hook that averages."""
    names = {id(p): n for n, p in model.module.named_parameters()}
    seen: list[list[str]] = []

    def note(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append([names[id(p)] for p in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    model.register_comm_hook(None, note)
    return seen


# -- dtypes


def _rounded(rank: int, own: torch.dtype, wire: torch.dtype | None) -> tuple[float, int, bool]:
    """256 stands in .grad; this rank adds 1 or 2."""
    model = KnownDDP(Scales("a").to(own), reduce_dtype=wire)
    model.module.a.grad = torch.tensor(256.0, dtype=own)
    model(torch.tensor(1.0 + rank, dtype=own), use="a").backward()
    grad = model.module.a.grad
    return grad.item(), model.stats().bytes_reduced, grad.dtype == own


@pytest.mark.parametrize(
    ("own", "wire", "wanted"),
    [
        (torch.bfloat16, None, (256.0, 2)),
        (torch.bfloat16, torch.float32, (258.0, 4)),
        (torch.float32, None, (257.5, 4)),
        (torch.float32, torch.bfloat16, (256.0, 2)),
    ],
)
def test_gradients_are_summed_in_the_dtype_of_the_wire(ranks, own, wire, wanted):
    """The mean of 257 and 258 is 257.5. At 256 bfloat16 goes in steps of 2 and rounds ties to 256: exact until the end
    it is 258; rounded on the way 257 is 256, and half of 256 + 258 is 257, again 256."""
    assert ranks(2, _rounded, own, wire) == [(*wanted, True)] * 2


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("half", torch.float16), ("single", torch.float32), ("complex", torch.complex64)):
            self.register_parameter(f"of_{name}", nn.Parameter(torch.ones(3, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.of_half.float().sum() + self.of_single.sum() + self.of_complex.abs().sum())


def _mixed(rank: int) -> tuple[list[list[str]], list[float]]:
    _, model = make(_Mixed, reduce_dtype=torch.float32)
    seen = _travels(model)
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1))).backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    return sorted(map(sorted, seen)), [p.grad[0].real.item() for p in model.parameters()]


def test_real_gradients_of_all_dtypes_travel_together_and_complex_ones_apart(ranks):
    wanted = [["of_complex"], ["of_half", "of_single"]]
    assert ranks(2, _mixed) == [(wanted, [9.0, 9.0, 9.0])] * 2


@setups
def test_training_in_another_dtype(ranks, world_size, cap):
    ranks(world_size, _train_in_double, cap)


def _train_in_double(rank: int, cap: float | None) -> None:
    plain, model = make(bucket_cap_mb=cap, reduce_dtype=torch.float64)
    steps_are_right(plain, model, rank)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_the_dtype_must_be_real_and_floating(ranks, dtype):
    ranks(2, _wrong_dtype, dtype)


def _wrong_dtype(rank: int, dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match="reduce_dtype must be a real floating-point dtype"):
        make(reduce_dtype=dtype)


# -- delayed parameters


def _delayed(rank: int, names: list[str], cap: float | None) -> tuple[list[list[str]], list[float | None]]:
    module = Scales("a", "b", "c", "d")
    chosen = [(name, getattr(module, name)) for name in names]
    model = KnownDDP(module, bucket_cap_mb=cap, delay_all_reduce_named_params=chosen, param_to_hook_all_reduce=module.a)
    assert set(names) <= model.parameters_to_ignore
    seen = _travels(model)
    for _ in range(3):
        seen.clear()
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a b c d").backward()
    return seen, [p.grad.item() for p in model.parameters()]


def test_delayed_parameters_go_last(ranks):
    """Else d would be first, then c, b, a."""
    one_each = [["c"], ["a"], ["d"], ["b"]]
    assert ranks(2, _delayed, ["b", "d"], BYTE) == [(one_each, [9.0] * 4)] * 2
    assert ranks(2, _delayed, ["d"], None) == [([["c", "b", "a"], ["d"]], [9.0] * 4)] * 2


def _launches(rank: int) -> list[int]:
    module = Scales("a", "b")
    options: Any = {"delay_all_reduce_named_params": [("b", module.b)], "param_to_hook_all_reduce": module.a}
    model = KnownDDP(module, bucket_cap_mb=BYTE, **options)
    found = []
    for _ in range(3):
        before = model.stats().buckets_launched
        model(torch.tensor(1.0), use="b a").backward()
        found.append(model.stats().buckets_launched - before)
    return found


def test_each_parameter_travels_once(ranks):
    assert ranks(2, _launches) == [[2, 2, 2]] * 2


def _wrong_delay(rank: int) -> None:
    module = Scales("a", "b")
    with pytest.raises(ArgumentError, match="need to be set at the same time"):
        KnownDDP(module, delay_all_reduce_named_params=[("a", module.a)])
    with pytest.raises(UnknownParameterError):
        KnownDDP(module, delay_all_reduce_named_params=[("z", module.a)], param_to_hook_all_reduce=module.b)


def test_delayed_parameters_must_be_there(ranks):
    ranks(2, _wrong_delay)


# -- sizes of buckets


def _sizes(rank: int, options: dict[str, Any]) -> tuple[list[list[str]], list[int], int, bool]:
    _, model = make(lambda: Scales("a", "b", "c", "d", "e"), **options)
    seen = _travels(model)
    for _ in range(2):
        seen.clear()
        model(torch.tensor(1.0), use="a b c d e").backward()
    return seen, model.bucket_bytes_cap_list, model.bucket_bytes_cap, model.bucket_bytes_cap_default


MIB = 2**20


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ([["e", "d", "c", "b", "a"]], [], 25 * MIB, True)),
        ({"bucket_cap_mb": 8 * BYTE}, ([["e", "d"], ["c", "b"], ["a"]], [], 8, False)),
        ({"bucket_cap_mb_list": [4 * BYTE, 8 * BYTE]}, ([["e"], ["d", "c"], ["b", "a"]], [4, 8], 8, False)),
        ({"bucket_cap_mb_list": [12 * BYTE, 4 * BYTE]}, ([["e", "d", "c"], ["b"], ["a"]], [12, 4], 12, False)),
        (
            {"bucket_cap_mb_list": [1, 50], "bucket_cap_mb": 3},
            ([["e", "d", "c", "b", "a"]], [MIB, 50 * MIB], 50 * MIB, False),
        ),
    ],
    ids=str,
)
def test_buckets_have_the_sizes_that_were_asked_for(ranks, options, wanted):
    """A parameter has 4 bytes; the last size of a list repeats."""
    assert ranks(2, _sizes, options) == [wanted] * 2


def _default_sizes(rank: int, num_layers: int, backend: str) -> list[int]:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(num_layers)))
    model = KnownDDP(layers, process_group=dist.new_group(backend=backend))
    seen = _travels(model)
    for _ in range(2):
        seen.clear()
        model(torch.ones(1, 256)).sum().backward()
    return list(map(len, seen))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "undefined"])
@pytest.mark.parametrize(("num_layers", "wanted"), [(63, [16, 32, 15]), (64, [4, 8, 32, 20])])
def test_over_gloo_the_first_buckets_are_small_where_much_is_sent(ranks, backend, num_layers, wanted):
    """A layer has 256 KiB. Below 16 MiB buckets have 4, 8 and 16 MiB, from there on 1, 2, 8 and 16. The backend is
    "undefined" where ``init_process_group`` was told none.
    """
    assert ranks(2, _default_sizes, num_layers, backend) == [wanted] * 2


def test_elsewhere_they_have_the_sizes_of_stock_ddp():
    assert [default_cap_bytes("nccl", of_much=of_much) for of_much in (False, True)] == [(MIB, 25 * MIB)] * 2


class _Mebibytes(nn.Module):
    """Each parameter has one, in float32."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(2**18) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * param).sum() for param in self.params]).sum()


def _cast_around_wrapping(rank: int) -> tuple[list[int], list[float]]:
    """17 MiB when rank 0 wraps, 8.5 when rank 1 does, and when they train."""
    module = _Mebibytes(17)
    if rank == 1:
        module.bfloat16()
    model = KnownDDP(module, init_sync=False)
    module.bfloat16()
    seen = _travels(model)
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        model(torch.tensor(2.0 * (rank + 1), dtype=torch.bfloat16)).backward()
    return list(map(len, seen)), [float(param.grad.max()) for param in module.params]


def test_the_sizes_are_those_of_what_is_sent_not_of_what_was_wrapped(ranks):
    """A parameter has 1 MiB, then half as much: eight are 4 MiB, and nine the rest. The mean of 2 and 4 is 3."""
    assert ranks(2, _cast_around_wrapping) == [([8, 9], [3.0] * 17)] * 2


def _other_sizes(rank: int) -> str:
    model = KnownDDP(Scales("a", "b"), init_sync=False, bucket_cap_mb=rank + 1)
    return raises_everywhere(model(torch.tensor(1.0), use="a b").backward, RanksDifferError)


def test_sizes_that_differ_between_ranks_are_an_error_before_anything_is_sent(ranks):
    """Where construction was not to compare them. Each rank says its sizes, and again those for much."""
    sizes = [((rank * MIB,), (rank * MIB,)) for rank in (1, 2)]
    for text in ranks(2, _other_sizes):
        assert f"bucket sizes in bytes by rank: {sizes}" in text
