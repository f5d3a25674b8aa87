"""Several wrappers and sharded optimizers in one join context.

Expected values are worked out in the docstring or come from plain autograd on one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from models import Scales, make, mean_grads, raises_everywhere
from steps import TINY_CAP_MB, assert_same_parameters, grads_of, square_loss, step_is_right
from torch.distributed.algorithms.join import Join

from knownddp import UsageError


def _several(rank: int, counts: Sequence[int]) -> None:
    """Two wrappers, one after the other in each iteration, and optimizers that join too."""
    zero = _zero_optimizer()
    plain = [make(bucket_cap_mb=TINY_CAP_MB)[0] for _ in range(2)]
    models = [make(bucket_cap_mb=TINY_CAP_MB)[1] for _ in range(2)]
    optimizers = [zero(m.parameters(), torch.optim.Adam, lr=0.1) for m in models]
    oracles = [torch.optim.Adam(m.parameters(), lr=0.1) for m in plain]
    with Join([models[0], optimizers[0], models[1], optimizers[1]], divide_by_initial_world_size=False):
        for step in range(counts[rank]):
            for model, optimizer in zip(models, optimizers, strict=True):
                model.zero_grad()
                square_loss(model, rank, step).backward()
                optimizer.step()
    for step in range(max(counts)):
        active = [r for r, count in enumerate(counts) if step < count]
        for module, oracle in zip(plain, oracles, strict=True):
            grads = mean_grads(module, len(active), lambda m, r, s=step, a=active: square_loss(m, a[r], s))
            for name, param in module.named_parameters():
                param.grad = grads[name]
            oracle.step()
    for module, model in zip(plain, models, strict=True):
        assert_same_parameters(model, module)
        step_is_right(module, model, rank)


def _zero_optimizer() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it compiles functional optimizers
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@pytest.mark.parametrize("counts", [(1, 3), (3, 1, 2)], ids=str)
def test_several_wrappers_and_sharded_optimizers_join_together(ranks, counts):
    ranks(len(counts), _several, counts)


def _interleaved(rank: int, counts: Sequence[int]) -> str:
    """One loss of two wrappers."""
    plain, first = make()
    _, second = make()

    def train() -> None:
        with Join([first, second]):
            for step in range(counts[rank]):
                (square_loss(first, rank, step) + square_loss(second, rank, step)).backward()

    text = raises_everywhere(train, RuntimeError if counts[rank] == 0 else UsageError)
    for model in (first, second):
        step_is_right(plain, model, rank)
    return text


@pytest.mark.parametrize("counts", [(2, 2), (0, 2), (1, 0, 2)], ids=str)
def test_wrappers_that_join_together_must_take_turns(ranks, counts):
    """Else ranks without inputs would wait for the first while those with inputs wait for the second."""
    for count, text in zip(counts, ranks(len(counts), _interleaved, counts), strict=True):
        assert ("join context that several wrappers share" if count else "raised") in text


def _one_drops(rank: int) -> list[list[float | None]]:
    """In each iteration the first wrapper's output is left aside."""
    first, second = (make(lambda: Scales("a"))[1] for _ in range(2))
    with Join([first, second]):
        for _ in range(2 - rank):
            first(torch.tensor(1.0), use="a")
            second(torch.tensor(6.0), use="a").backward()
            assert first.module.a.grad is None
    return [grads_of(first), grads_of(second)]


def test_a_wrapper_whose_output_is_dropped_does_not_hold_up_the_others(ranks):
    """The second wrapper's gradients: a mean of 6, then half of 6 beside rank 1, which has no input: (6 + 6) / 2."""
    assert ranks(2, _one_drops) == [[[None], [6.0]]] * 2
