"""How far means are from exact ones, on real ranks: KnownDDP over gloo against fractions."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor, nn

from ..claims import Evidence
from ..processes import on_ranks

# Unit roundoff, and half the distance of subnormal numbers.
FORMATS: Final = {
    "float32": (Fraction(1, 2**24), Fraction(1, 2**150)),
    "float16": (Fraction(1, 2**11), Fraction(1, 2**25)),
    "bfloat16": (Fraction(1, 2**8), Fraction(1, 2**134)),
}
# Small parameters are copied into a bucket together, larger ones one by one, and the largest are reduced in place.
VALUES: Final = 1200
SHAPES: Final = {"small": (30, 40), "one by one": (90, 100), "in place": (1100, 2000)}
LOOKED_AT: Final = {"small": VALUES, "one by one": 400, "in place": 400}
# The dtype of a parameter, and the one in which its gradient travels.
DTYPES: Final = (("float32", "float32"), ("float16", "float16"), ("float32", "float16"), ("bfloat16", "bfloat16"))


def gradients(rank: int, travels: str, kind: str) -> Tensor:
    """Values from subnormal ones to nine tenths of the largest; some alike on all ranks, some that cancel."""
    common, own = random.Random(1), random.Random(2 + rank)
    dtype = getattr(torch, travels)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = []
    for _ in range(VALUES):
        which, size = common.random(), common.uniform(-4, 4)
        if which < 0.1:
            values.append(0.9 * largest * common.choice((1, -1)))
        elif which < 0.2:
            values.append(smallest * own.uniform(-2, 2))
        elif which < 0.4:
            values.append(size * (-1) ** rank * own.uniform(0.9, 1.1))
        else:
            values.append(2 ** own.uniform(-6, 6) * own.choice((1, -1)))
    shape = torch.Size(SHAPES[kind])
    again = torch.tensor(values, dtype=torch.float64).to(dtype).repeat(shape.numel() // VALUES + 1)
    return again[: shape.numel()].view(shape)


def some_of(tensor: Tensor, kind: str) -> list[float]:
    """Elements from all over, the same ones on all ranks."""
    places = random.Random(3).sample(range(tensor.numel()), LOOKED_AT[kind])
    return tensor.flatten()[places].double().tolist()


class Weighted(nn.Module):
    """A loss whose gradient is the factor that it is given."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


Means = tuple[list[float], str]  # those looked at, and a digest of all


def means_on(rank: int, dtypes: tuple[tuple[str, str], ...]) -> tuple[dict[tuple[str, str, str], list[Means]], int]:
    """The means of two backwards as this rank has them, by dtypes and kind; and how many lie where the gradient lay.

    Odd ranks hold the parameter transposed.
    """
    from knownddp import KnownDDP

    answers: dict[tuple[str, str, str], list[Means]] = {}
    in_place = 0
    for (name, travels), kind in itertools.product(dtypes, SHAPES):
        dtype = getattr(torch, name)
        module = Weighted(SHAPES[kind], dtype)
        model = KnownDDP(module, reduce_dtype=None if name == travels else getattr(torch, travels))
        if rank % 2:
            module.weight.data = module.weight.data.t().contiguous().t()
        arrived: list[int] = []
        module.weight.register_post_accumulate_grad_hook(lambda p, to=arrived: to.append(p.grad.data_ptr()))  # type: ignore[no-untyped-call]
        found = answers[name, travels, kind] = []
        for _ in range(2):  # the second launches while it runs
            module.weight.grad = None
            model(gradients(rank, travels, kind).to(dtype)).backward()
            mean = module.weight.grad
            assert mean is not None
            # A copy in other strides, which odd ranks need, may come to lie where the gradient did.
            in_place += rank % 2 == 0 and kind == "in place" and name == travels and mean.data_ptr() == arrived[-1]
            digest = hashlib.sha256(mean.double().contiguous().numpy().tobytes()).hexdigest()
            found.append((some_of(mean, kind), digest))
    return answers, in_place


def bound_of(shares: list[Fraction], u: Fraction, eta: Fraction) -> Fraction:
    """``bound`` of coq/Mean.v, for a sum as deep as there are ranks."""
    grown = (1 + u) ** len(shares)
    return (grown - 1) * sum(abs(share) for share in shares) + len(shares) * eta * grown


def within_bound(quick: bool) -> Evidence:
    checked, in_place, worst = 0, 0, Fraction(0)
    dtypes = DTYPES[:3] if quick else DTYPES
    for world_size in (2,) if quick else (2, 3, 5):
        answers, counts = zip(*on_ranks(world_size, means_on, dtypes), strict=True)
        in_place += sum(counts)
        for case, found in answers[0].items():
            travels, kind = case[1:]
            every = [some_of(gradients(rank, travels, kind), kind) for rank in range(world_size)]
            assert all(answer[case] == found for answer in answers), f"ranks have different means of {case}"
            for means, _ in found:
                for mean, *values in zip(means, *every, strict=True):
                    shares = [Fraction(value) / world_size for value in values]
                    what = f"the mean of {values} in {case} is {mean}"
                    assert math.isfinite(mean), what
                    error, bound = abs(Fraction(mean) - sum(shares)), bound_of(shares, *FORMATS[travels])
                    assert error <= bound, f"{what}, off by {float(error)}, more than {float(bound)}"
                    worst = max(worst, error / bound)
                    checked += 1
    assert worst > Fraction(1, 10), "the bound says little"
    assert in_place, "nothing was reduced in place"
    return Evidence(checked, f"worst error {float(worst):.2f} of the bound; {in_place} parameters reduced in place")
