"""How far means are from exact ones, on real ranks: KnownDDP over gloo against fractions."""

from __future__ import annotations

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
SHAPE: Final = (30, 40)


def gradients(rank: int, dtype: torch.dtype) -> Tensor:
    """Values from subnormal ones to nine tenths of the largest; some alike on all ranks, some that cancel."""
    common, own = random.Random(1), random.Random(2 + rank)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = []
    for _ in range(SHAPE[0] * SHAPE[1]):
        kind, size = common.random(), common.uniform(-4, 4)
        if kind < 0.1:
            values.append(0.9 * largest * common.choice((1, -1)))
        elif kind < 0.2:
            values.append(smallest * own.uniform(-2, 2))
        elif kind < 0.4:
            values.append(size * (-1) ** rank * own.uniform(0.9, 1.1))
        else:
            values.append(2 ** own.uniform(-6, 6) * own.choice((1, -1)))
    return torch.tensor(values, dtype=torch.float64).to(dtype).view(SHAPE)


class Weighted(nn.Module):
    """A loss whose gradient is the factor that it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


def means_on(rank: int, names: tuple[str, ...]) -> dict[str, list[list[float]]]:
    """The means of two backwards as this rank has them, by dtype. Odd ranks hold the parameter transposed."""
    from knownddp import KnownDDP

    answers: dict[str, list[list[float]]] = {}
    for name in names:
        dtype = getattr(torch, name)
        module = Weighted(dtype)
        model = KnownDDP(module)
        if rank % 2:
            module.weight.data = module.weight.data.t().contiguous().t()
        answers[name] = []
        for _ in range(2):  # the second launches while it runs
            module.weight.grad = None
            model(gradients(rank, dtype)).backward()
            assert module.weight.grad is not None
            answers[name].append(module.weight.grad.double().flatten().tolist())
    return answers


def bound_of(shares: list[Fraction], u: Fraction, eta: Fraction) -> Fraction:
    """``bound`` of coq/Mean.v, for a sum as deep as there are ranks."""
    grown = (1 + u) ** len(shares)
    return (grown - 1) * sum(abs(share) for share in shares) + len(shares) * eta * grown


def within_bound(quick: bool) -> Evidence:
    checked, worst = 0, Fraction(0)
    names = ("float32", "float16") if quick else tuple(FORMATS)
    for world_size in (2,) if quick else (2, 3, 5):
        answers = on_ranks(world_size, means_on, names)
        for name in names:
            every = [gradients(rank, getattr(torch, name)).double().flatten().tolist() for rank in range(world_size)]
            assert all(answer[name] == answers[0][name] for answer in answers), f"ranks have different means in {name}"
            for means in answers[0][name]:
                for mean, *values in zip(means, *every, strict=True):
                    shares = [Fraction(value) / world_size for value in values]
                    what = f"the mean of {values} in {name} is {mean}"
                    assert math.isfinite(mean), what
                    error, bound = abs(Fraction(mean) - sum(shares)), bound_of(shares, *FORMATS[name])
                    assert error <= bound, f"{what}, off by {float(error)}, more than {float(bound)}"
                    worst = max(worst, error / bound)
                    checked += 1
    assert worst > Fraction(1, 10), "the bound says little"
    return Evidence(checked, f"worst error {float(worst):.2f} of the bound; {', '.join(names)}")
