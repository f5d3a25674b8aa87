"""Uneven inputs, by hand: divisors, early ends, errors, dropped outputs, several joinables.

Expected values are worked out in the docstring or come from plain autograd on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from models import Fails, Scales, inputs, make, mean_grads, raises_everywhere
from steps import TINY_CAP_MB, assert_same_parameters, grads_of, square_loss, step_is_right

from knownddp import RanksDifferError, UnfinishedBackwardError, UsageError

# -- divisors


def _divided(rank: int, divides_by_all: bool) -> list[list[float | None]]:
    """Rank r has r + 1 inputs, all of them 6 (r + 1)."""
    _, model = make(lambda: Scales("a", "b"))
    found = []
    with model.join(divide_by_initial_world_size=divides_by_all):
        for _ in range(rank + 1):
            model.zero_grad()
            model(torch.tensor(6.0 * (rank + 1)), use="a", unused_parameters=["b"]).backward()
            found.append(grads_of(model))
    return [*found, grads_of(model)]


def test_gradients_are_divided_by_the_number_of_all_ranks(ranks):
    """Sums by iteration: 6 + 12 + 18, 12 + 18, 18; thirds of them: 12, 10, 6. Afterwards each rank has its own last."""
    first, second, third = [12.0, None], [10.0, None], [6.0, None]
    assert ranks(3, _divided, True) == [[first, first], [first, second, second], [first, second, third, third]]


def test_gradients_are_divided_by_the_number_of_ranks_that_have_inputs(ranks):
    """36 / 3, 30 / 2, 18 / 1."""
    first, second, third = [12.0, None], [15.0, None], [18.0, None]
    assert ranks(3, _divided, False) == [[first, first], [first, second, second], [first, second, third, third]]


def _divisor_afterwards(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a"))
    x = torch.tensor(6.0 * (rank + 1))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank):
            model(x, use="a").backward()
    model.zero_grad()
    model(x, use="a").backward()
    return grads_of(model)


def test_afterwards_gradients_are_divided_by_the_number_of_all_ranks(ranks):
    """(6 + 12 + 18) / 3"""
    assert ranks(3, _divisor_afterwards) == [[12.0]] * 3


# -- one context after another, and none


def _twice(rank: int) -> None:
    """In the second context the other rank has more inputs."""
    plain, model = make(bucket_cap_mb=TINY_CAP_MB)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for counts in ((1, 3), (3, 1), (2, 2)):
        with model.join(divide_by_initial_world_size=False):
            for step in range(counts[rank]):
                model.zero_grad()
                square_loss(model, rank, step).backward()
                optimizers[0].step()
        for step in range(max(counts)):
            active = [r for r in range(2) if step < counts[r]]
            grads = mean_grads(plain, len(active), lambda m, r, s=step, a=active: square_loss(m, a[r], s))
            for name, param in plain.named_parameters():
                param.grad = grads[name]
            optimizers[1].step()
        assert_same_parameters(model, plain)
        step_is_right(plain, model, rank)


def test_several_contexts_one_after_another(ranks):
    ranks(2, _twice)


def _disabled(rank: int) -> list[int]:
    plain, model = make()
    with model.join(enable=False):
        step_is_right(plain, model, rank)
    assert not model._join_config.enable
    sent = []
    for enable in (False, True):
        before = model.stats().backwards_finished
        with model.join(enable=enable):
            pass
        sent.append(model.stats().backwards_finished - before)
    return sent


def test_a_context_that_is_disabled_does_nothing(ranks):
    assert ranks(2, _disabled) == [[0, 0]] * 2


# -- early ends and errors


def _thrown(rank: int) -> tuple[int, str]:
    plain, model = make()
    done = 0

    def train() -> None:
        nonlocal done
        with model.join(throw_on_early_termination=True):
            for step in range((3, 2, 4)[rank]):
                square_loss(model, rank, step).backward()
                done += 1

    text = raises_everywhere(train, RuntimeError)
    step_is_right(plain, model, rank)
    return done, text


def test_all_ranks_may_stop_as_soon_as_one_has_run_out(ranks):
    """Rank 1 has 2 inputs."""
    detected = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert ranks(3, _thrown) == [(2, detected), (2, "Rank 1 exhausted all inputs."), (2, detected)]


def _error_in_the_body(rank: int) -> None:
    plain, model = make()

    def train() -> None:
        with model.join():
            square_loss(model, rank, 1).backward()
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            train()
        step_is_right(plain, model, rank)


def test_an_error_in_the_body_leaves_at_once(ranks):
    ranks(2, _error_in_the_body)


def _error_in_a_backward(rank: int) -> str:
    """Of rank 2, in its second iteration; rank 0 has no inputs any more, and hears of it too."""
    plain, model = make()

    def train() -> None:
        with model.join():
            for step in range(rank + 1):
                x = inputs(rank, 5, 3, seed=step).requires_grad_()
                model(Fails.apply(x) if (rank, step) == (2, 1) else x).sum().backward()

    text = raises_everywhere(train, ArithmeticError if rank == 2 else RuntimeError)
    step_is_right(plain, model, rank)
    return text


def test_an_error_in_a_backward_is_told_to_ranks_without_inputs(ranks):
    without_inputs, peer, raised = ranks(3, _error_in_a_backward)
    assert "on rank 2 raised" in without_inputs
    assert "on rank 2 raised" in peer
    assert raised == "on purpose"


def _mixed(rank: int) -> str:
    plain, model = make()

    def train() -> None:
        with model.join():
            if rank == 2:
                return
            with model.no_sync() if rank == 0 else nullcontext():
                square_loss(model, rank)

    text = raises_everywhere(train, RanksDifferError)
    step_is_right(plain, model, rank)
    return text


def test_no_sync_on_some_ranks_alone_is_an_error_on_all(ranks):
    for text in ranks(3, _mixed):
        assert "no_sync" in text


def _unfinished(rank: int) -> str:
    """Layer 1 is skipped without a word; rank 1 has run out of inputs when rank 0's next forward tells."""
    plain, model = make()

    def train() -> None:
        with model.join():
            for step in range(3 - 2 * rank):
                square_loss(model, rank, step, skip={1}).backward()

    text = raises_everywhere(train, UnfinishedBackwardError)
    step_is_right(plain, model, rank)
    return text


def test_an_unfinished_backward_is_told_to_ranks_without_inputs(ranks):
    for text in ranks(2, _unfinished):
        assert "layers.1.weight" in text


def _second_backward(rank: int) -> str:
    plain, model = make()
    texts: list[str] = []

    def train() -> None:
        with model.join():
            for step in range(2 - rank):
                loss = square_loss(model, rank, step)
                loss.backward(retain_graph=True)
                if rank == 0:
                    texts.append(raises_everywhere(loss.backward, UsageError))

    train()
    step_is_right(plain, model, rank)
    return " ".join(texts)


def test_a_second_backward_after_one_forward_is_an_error_where_it_begins(ranks):
    """Nothing of it was sent, so others go on."""
    text, nothing = ranks(2, _second_backward)
    assert text.count("second backward") == 2
    assert nothing == ""


# -- dropped outputs, and forwards without a backward


def _dropped(rank: int, drops: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Rank r's inputs are 6 (r + 1); in the iterations ``drops[r]`` it leaves the output aside."""
    _, model = make(lambda: Scales("a"))
    found = []
    with model.join():
        for step in range((3, 2)[rank]):
            model.zero_grad()
            output = model(torch.tensor(6.0 * (rank + 1)), use="a")
            if step not in drops[rank]:
                output.backward()
            found.append(grads_of(model))
    return [*found, grads_of(model)]


def test_a_dropped_output_is_made_up_for_by_the_next_forward(ranks):
    """Halved sums: 6 + 12 by both; 12 by rank 1, which rank 0 gets in its third forward; there it adds 6 of its own,
    and half of both is 6."""
    none, nine, six = [None], [9.0], [6.0]
    assert ranks(2, _dropped, ((1,), ())) == [[nine, none, six, six], [nine, six, six]]


@pytest.mark.parametrize(
    ("drops", "wanted"),
    [
        (((2,), ()), [[9.0, 9.0, None, None], [9.0, 9.0, 9.0]]),
        (((), (1,)), [[9.0, 3.0, 3.0, 3.0], [9.0, None, 3.0]]),
        (((2,), (1,)), [[9.0, 3.0, None, None], [9.0, None, 3.0]]),
        (((0, 1, 2), (0, 1)), [[None] * 4, [None] * 3]),
    ],
    ids=str,
)
def test_the_last_output_may_be_dropped(ranks, drops, wanted):
    """Halved sums of what was not dropped: 6 + 12, or 6 by rank 0 alone. What nobody used leaves .grad as it was."""
    assert ranks(2, _dropped, drops) == [[[grad] for grad in grads] for grads in wanted]


def _without_grad(rank: int) -> None:
    """Each rank runs its own number of forwards without gradients."""
    plain, model = make()
    with model.join():
        for step in range(3 - rank):
            with torch.no_grad():
                for _ in range(rank + 2 * step):
                    square_loss(model, rank)
            model.zero_grad()
            square_loss(model, rank, step).backward()
    step_is_right(plain, model, rank)


def test_forwards_without_gradients_do_not_count(ranks):
    ranks(3, _without_grad)


def _two_forwards(rank: int) -> list[list[float | None]]:
    _, model = make(lambda: Scales("a"))
    x = torch.tensor(6.0 * (rank + 1))
    found = []
    with model.join():
        for _ in range(2 - rank):
            model.zero_grad()
            (model(x, use="a") + model(2 * x, use="a")).backward()
            found.append(grads_of(model))
    return found


def test_two_forwards_before_one_backward(ranks):
    """3 x 6 and 3 x 12: a mean of 27; then 18 / 2 on rank 0."""
    assert ranks(2, _two_forwards) == [[[27.0], [9.0]], [[27.0]]]


def _carried(rank: int) -> list[list[float | None]]:
    """Rank 1 accumulates into b under ``no_sync`` and then drops its output."""
    _, model = make(lambda: Scales("a", "b"))
    x = torch.tensor(6.0 * (rank + 1))
    with model.join():
        with model.no_sync():
            model(x, use="a" if rank == 0 else "b").backward()
        output = model(x, use="a", unused_parameters=["b"])
        if rank == 0:
            output.backward()
        model(x, use="a", unused_parameters=["b"])
    return grads_of(model)


def test_what_was_accumulated_before_a_dropped_output_is_averaged(ranks):
    """x is 6 and 12. a: 6 + 6 on rank 0, nothing on rank 1; b: 12 on rank 1. Halved."""
    assert ranks(2, _carried) == [[6.0, 6.0]] * 2
