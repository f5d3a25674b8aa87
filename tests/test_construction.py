"""Making a wrapper where something is wrong: models or arguments that differ between ranks, or cannot be wrapped.

Whatever is wrong on any rank raises on every rank; each such test then makes a correct wrapper and trains it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import make, raises_everywhere
from steps import steps_are_right, world_sizes
from torch import Tensor, nn

from knownddp import ArgumentError, DeviceError, KnownDDP, ModelError, PeerError, RanksDifferError


def _a_correct_wrapper_works(rank: int) -> None:
    plain, model = make()
    steps_are_right(plain, model, rank, steps=2)


# -- models that differ


def _plain() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), second=nn.Linear(4, 1)))


def _other_names() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), third=nn.Linear(4, 1)))


def _other_shapes() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 5), second=nn.Linear(5, 1)))


def _other_dtypes() -> nn.Module:
    model = _plain()
    model.second.double()
    return model


def _more_parameters() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), second=nn.Linear(4, 1), third=nn.Linear(1, 1)))


def _more_buffers() -> nn.Module:
    model = _plain()
    model.first.register_buffer("table", torch.zeros(2))
    return model


def _longer_buffers() -> nn.Module:
    model = _plain()
    model.first.register_buffer("table", torch.zeros(3))
    return model


def _integer_buffers() -> nn.Module:
    model = _plain()
    model.first.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    return model


def _sparse() -> nn.Module:
    return nn.Embedding(4, 2, sparse=True)


def _dense() -> nn.Module:
    return nn.Embedding(4, 2)


def _differing(rank: int, usual: Callable[[], nn.Module], other: Callable[[], nn.Module], odd: int) -> str:
    message = raises_everywhere(lambda: KnownDDP(other() if rank == odd else usual()), RanksDifferError)
    _a_correct_wrapper_works(rank)
    return message


DIFFERENCES = {
    "names": (_plain, _other_names, "parameters", ["second.weight", "third.weight"]),
    "shapes": (_plain, _other_shapes, "parameters", ["first.weight [4, 3]", "first.weight [5, 3]"]),
    "dtypes": (_plain, _other_dtypes, "parameters", ["second.weight [1, 4]", "float32", "float64"]),
    "counts": (_plain, _more_parameters, "parameters", ["third.weight [1, 1]", "rank 0 ("]),
    "buffers": (_plain, _more_buffers, "buffers", ["first.table [2]"]),
    "buffer-shapes": (_more_buffers, _longer_buffers, "buffers", ["first.table [2]", "first.table [3]"]),
    "buffer-dtypes": (_more_buffers, _integer_buffers, "buffers", ["first.table [2]", "float32", "int64"]),
    "sparsity": (_dense, _sparse, "parameters", ["weight [4, 2]", "sparse gradient"]),
}


@pytest.mark.parametrize("odd", [0, -1], ids=["odd-rank-0", "odd-last-rank"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_models_that_differ_raise_on_every_rank_and_name_the_difference(ranks, difference, odd):
    usual, other, what, phrases = DIFFERENCES[difference]
    world_size = 2 if odd else 3
    for rank, message in enumerate(ranks(world_size, _differing, usual, other, odd % world_size)):
        assert message.startswith(f"[rank {rank} of {world_size}] the {what} of the module differ")
        assert all(phrase in message for phrase in phrases), message


# -- arguments that differ


def _differing_arguments(rank: int, name: str, value: Any) -> str:
    message = raises_everywhere(lambda: KnownDDP(_plain(), **({name: value} if rank == 1 else {})), RanksDifferError)
    _a_correct_wrapper_works(rank)
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("find_unused_parameters", True),
        ("bucket_cap_mb", 1),
        ("unused_agreement", "same"),
        ("forward_sync_buffers", False),
        ("own_group", False),
    ],
)
@world_sizes
def test_an_argument_that_differs_raises_on_every_rank_and_names_it(ranks, world_size, name, value):
    for rank, message in enumerate(ranks(world_size, _differing_arguments, name, value)):
        assert message.startswith(f"[rank {rank} of {world_size}] {name} is ")
        assert f"{value!r}"[:4] in message
        assert "on rank 1" in message


# -- what one rank cannot wrap


class _TakesUnused(nn.Linear):
    def forward(self, x: Tensor, unused_parameters: object = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def _frozen_model() -> nn.Module:
    return _plain().requires_grad_(False)


def _empty_model() -> nn.Module:
    return nn.Tanh()


def _lazy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))


def _lazy_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False))


def _inference_model() -> nn.Module:
    with torch.inference_mode():
        return _plain()


def _scattered_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta"))


def _taking_model() -> nn.Module:
    return _TakesUnused(3, 2)


UNFIT = {
    "frozen": (_frozen_model, ModelError, "requires a gradient"),
    "empty": (_empty_model, ModelError, "requires a gradient"),
    "lazy": (_lazy_model, ModelError, "Modules with uninitialized parameters"),
    "lazy-buffers": (_lazy_buffers, ModelError, "1.running_mean, 1.running_var"),
    "inference": (_inference_model, ModelError, "made in inference mode"),
    "several-device-types": (_scattered_model, DeviceError, "0.weight on cpu, 1.weight on meta"),
    "own-argument": (_taking_model, ArgumentError, "with model.unused(layers):"),
}


def _unfit(rank: int, build: Callable[[], nn.Module], kind: type[Exception], odd: int | None) -> str:
    is_odd = odd is None or rank == odd
    module = build() if is_odd else _plain()
    message = raises_everywhere(lambda: KnownDDP(module), kind if is_odd else PeerError)
    _a_correct_wrapper_works(rank)
    return message


@pytest.mark.parametrize("odd", [0, 1, None], ids=["on-rank-0", "on-rank-1", "everywhere"])
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_module_that_one_rank_cannot_wrap_raises_on_every_rank(ranks, unfit, odd):
    """Its own error where the cause is; elsewhere an error that says which rank and repeats the cause."""
    build, kind, says = UNFIT[unfit]
    world_size = 3 if odd == 1 else 2
    for rank, message in enumerate(ranks(world_size, _unfit, build, kind, odd)):
        assert says in message
        assert odd in (rank, None) or f"could not be made on rank {odd}" in message


def _bad_argument(rank: int, name: str, value: Any, kind: type[Exception], odd: int | None) -> str:
    is_odd = odd is None or rank == odd
    arguments = {name: value} if is_odd else {}
    arguments.setdefault("module", _plain())
    message = raises_everywhere(lambda: KnownDDP(**arguments), kind if is_odd else PeerError)
    _a_correct_wrapper_works(rank)
    return message


BAD = [
    ("bucket_cap_mb", 0, "bucket_cap_mb"),
    ("bucket_cap_mb", -1.5, "bucket_cap_mb"),
    ("bucket_cap_mb", float("nan"), "bucket_cap_mb"),
    ("unused_agreement", "maybe", "'union', 'same', 'trust'"),
    ("process_group", "gloo", "process_group must be a ProcessGroup"),
    ("device_ids", [0, 1], "device_ids"),
    ("device_ids", 0, "device_ids=[0]"),
    ("device_ids", "cpu", "device_ids=['cpu']"),
    ("reduce_dtype", "float32", "torch.float32"),
    ("module", iter(()), "torch.nn.Module"),
    ("output_device", 0, "needs device_ids"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_an_argument_that_makes_no_sense_raises_and_names_it(ranks, name, value, says):
    assert all(says in message for message in ranks(2, _bad_argument, name, value, ArgumentError, None))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("bucket_cap_mb", 0, ArgumentError),
        ("unused_agreement", "maybe", ArgumentError),
        ("reduce_dtype", torch.int32, ArgumentError),
    ],
)
def test_an_argument_that_makes_no_sense_on_one_rank_raises_on_every_rank(ranks, name, value, kind):
    assert all(name in message for message in ranks(2, _bad_argument, name, value, kind, 1))
