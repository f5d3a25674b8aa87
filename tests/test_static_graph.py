"""Graphs that never change: the first backward shows which parameters are unused, and whatever changes is an error.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Fails, Scales, Skippable, inputs, make, raises_everywhere
from steps import declares, grads_of, setups, square_loss, step_is_right, steps_are_right
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import GraphChangedError, KnownDDP, PeerFailedError

# Skippable(): a layer has 3 x 3 + 3 floats.
LAYER_BYTES = 12 * 4


def _make_static(how: str, build: Callable[[], nn.Module] = Skippable, **options: Any) -> tuple[nn.Module, KnownDDP]:
    """By the constructor's argument, or afterwards."""
    plain, model = make(build, static_graph=how == "argument", **options)
    if how == "setter":
        model._set_static_graph()
    return plain, model


hows = pytest.mark.parametrize("how", ["argument", "setter"])


# -- what stays the same


def _skips(module: nn.Module, rank: int, step: int) -> Tensor:
    """Layer 3 is used by no rank, layers 0 and 1 by some."""
    return square_loss(module, rank, step, skip={rank % 2, 3})


def _unused(rank: int, how: str, cap: float | None) -> list[tuple[int, int, int]]:
    plain, model = _make_static(how, bucket_cap_mb=cap)
    found = []
    for step in range(4):
        step_is_right(plain, model, rank, step, _skips)
        stats = model.stats()
        found.append((stats.bytes_reduced, stats.bytes_skipped, stats.late_rounds))
    return found


@hows
@setups
def test_what_no_rank_uses_is_never_sent(ranks, world_size, cap, how):
    """3 layers travel in each step, the first one too, and one does not; nothing is late."""
    wanted = [(3 * LAYER_BYTES * n, LAYER_BYTES * n, 0) for n in (1, 2, 3, 4)]
    assert ranks(world_size, _unused, how, cap) == [wanted] * world_size


class _Repeating(nn.Module):
    """Layers that are used several times or recomputed, in one of several manners."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        if manner == "tied":
            self.last.weight = self.first.weight
        self.manner = manner

    def _again(self, x: Tensor) -> Tensor:
        if self.manner == "twice":
            return self.shared(torch.tanh(self.shared(x)))
        if self.manner == "tied":
            return self.shared(x)
        reentrant = "reentrant" in self.manner.split()
        for _ in range(2 if "twice" in self.manner else 1):
            x = checkpoint(self.shared, torch.tanh(x), use_reentrant=reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self._again(self.first(x))))


MANNERS = ["twice", "tied", "reentrant once", "reentrant twice", "other once", "other twice"]


def _repeating(rank: int, manner: str, cap: float | None) -> int:
    plain, model = _make_static("argument", lambda: _Repeating(manner), bucket_cap_mb=cap)
    steps_are_right(plain, model, rank, steps=1)
    late = model.stats().late_rounds
    steps_are_right(plain, model, rank, steps=3)
    return model.stats().late_rounds - late


@pytest.mark.parametrize("manner", MANNERS)
@setups
def test_parameters_that_are_used_or_recomputed_several_times(ranks, world_size, cap, manner):
    """After the first step nothing is late any more."""
    assert ranks(world_size, _repeating, manner, cap) == [0] * world_size


def _all_in_a_checkpoint(rank: int) -> None:
    """No managed parameter is in the outer graph."""

    class Inside(Skippable):
        def forward(self, x: Tensor, skip: Sequence[int] = ()) -> Tensor:
            return checkpoint(super().forward, x, skip, use_reentrant=True)

    plain, model = _make_static("argument", Inside)
    for step in range(4):

        def loss_of(module: nn.Module, r: int, s: int) -> Tensor:
            return module(inputs(r, 5, 3, seed=s).requires_grad_(), skip={2}).square().mean()

        step_is_right(plain, model, rank, step, loss_of)


def test_a_module_that_is_wholly_inside_a_reentrant_checkpoint(ranks):
    ranks(2, _all_in_a_checkpoint)


def _micro_batches(rank: int, cap: float | None) -> None:
    """Unsynchronised calls may have other graphs: only those that synchronise must be alike."""
    plain, model = _make_static("argument", bucket_cap_mb=cap)

    def losses(module: nn.Module, r: int, step: int):  # type: ignore[no-untyped-def]
        for k in range(r + step % 2):
            with module.no_sync() if isinstance(module, KnownDDP) else torch.enable_grad():
                yield square_loss(module, r, 10 * step + k, skip={(step + k) % 4})
        yield square_loss(module, r, step, skip={0, 3})

    steps_are_right(plain, model, rank, losses, steps=4)


@setups
def test_unsynchronised_calls_in_between(ranks, world_size, cap):
    ranks(world_size, _micro_batches, cap)


def _declared(rank: int) -> None:
    """Declarations beside a static graph, right ones and wrong ones, change nothing."""
    plain, model = _make_static("argument")
    for step in range(4):

        def loss_of(module: nn.Module, r: int, s: int) -> Tensor:
            return square_loss(module, r, s, skip={3}, **declares(module, [f"layers.{3 - s % 2}"]))

        step_is_right(plain, model, rank, step, loss_of)
    assert model.stats().bytes_reduced == 4 * 3 * LAYER_BYTES


def test_declarations_change_nothing(ranks):
    ranks(2, _declared)


def _dropped(rank: int) -> None:
    plain, model = _make_static("argument")
    for step in range(4):
        if step != 1:
            _skips(model, rank, step)
        with torch.no_grad():
            square_loss(model, rank)
        step_is_right(plain, model, rank, step, _skips)


def test_forwards_without_a_backward_do_not_count(ranks):
    ranks(2, _dropped)


# -- what changes


def _kept(model: KnownDDP) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _changed(rank: int, first: set[int], then: set[int], cap: float | None) -> tuple[str, str]:
    """From the second step on rank 1 alone skips other layers. In ``.grad`` stands what the step before left."""
    plain, model = _make_static("argument", bucket_cap_mb=cap)

    def usual(module: nn.Module, r: int, step: int) -> Tensor:
        return square_loss(module, r, step, skip=first)

    steps_are_right(plain, model, rank, usual, steps=1)
    texts = []
    for _ in range(2):
        before = _kept(model)
        loss = square_loss(model, rank, 5, skip=then if rank == 1 else first)
        texts.append(raises_everywhere(loss.backward, GraphChangedError))
        after = _kept(model)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
        steps_are_right(plain, model, rank, usual, steps=2)
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({2}, {2, 3}, "on rank 1 reached at first and not now: layers.3.weight, layers.3.bias."),
        ({2, 3}, {2}, "on rank 1 reached now and not at first: layers.3.weight, layers.3.bias."),
        ({2}, {3}, "layers.2.bias; on rank 1 reached at first and not now: layers.3.weight, layers.3.bias."),
    ],
)
@setups
def test_a_graph_that_changes_on_one_rank_raises_on_all(ranks, world_size, cap, first, then, said):
    for texts in ranks(world_size, _changed, first, then, cap):
        for text in texts:
            assert said in text
            assert "Your training graph has changed in this iteration" in text
            assert "not compatible with static_graph" in text


class _Times(nn.Module):
    """One layer, recomputed a number of times: its gradients come that often."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


def _other_number_of_times(rank: int) -> str:
    plain, model = _make_static("setter", _Times)

    def loss_of(module: nn.Module, r: int, step: int, times: int = 2) -> Tensor:
        return module(inputs(r, 5, 3, seed=step).requires_grad_(), times=times).square().mean()

    steps_are_right(plain, model, rank, loss_of)
    text = raises_everywhere(loss_of(model, rank, 5, times=3 - rank).backward, GraphChangedError)
    steps_are_right(plain, model, rank, loss_of)
    return text


def test_another_number_of_times_is_another_graph(ranks):
    for text in ranks(2, _other_number_of_times):
        assert "on rank 0 reached another number of times: layer.weight, layer.bias" in text


def _first_fails(rank: int) -> None:
    """What an error cut short is not taken for the graph."""
    plain, model = _make_static("argument")
    for _ in range(2):
        x = model.module.layers[0](inputs(rank, 5, 3))
        loss = model(Fails.apply(x) if rank else x, skip={0, 2}).sum()
        raises_everywhere(loss.backward, ArithmeticError if rank else PeerFailedError)
        steps_are_right(plain, model, rank, _skips)


def test_a_backward_that_raised_teaches_nothing(ranks):
    ranks(2, _first_fails)


# -- copies


def _copied(rank: int, how: str, by: str) -> None:
    """After the first step, which taught the graph. Copies learn their own."""
    plain, model = _make_static(how)
    steps_are_right(plain, model, rank, _skips)
    if by == "copy":
        twin = copy.deepcopy(model)
    else:
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        twin = torch.load(stored, weights_only=False)
    assert twin.static_graph
    for _ in range(2):
        steps_are_right(plain, twin, rank, lambda m, r, s: square_loss(m, r, s, skip={2}))
        steps_are_right(plain, model, rank, _skips)
    raises_everywhere(square_loss(twin, rank, skip={0}).backward, GraphChangedError)


@pytest.mark.parametrize("by", ["copy", "pickle"])
@hows
def test_copies_go_on_averaging(ranks, how, by):
    ranks(2, _copied, how, by)


# -- the switch


def _set_late_or_twice(rank: int) -> tuple[str, bool]:
    _, model = make()
    with torch.no_grad():
        square_loss(model, rank)
    late = raises_everywhere(model._set_static_graph, RuntimeError)
    _, model = make(static_graph=True)
    with pytest.warns(UserWarning, match="no need to set it again"):
        model._set_static_graph()
    return late, model.static_graph


def test_it_is_set_once_and_before_the_first_forward(ranks):
    late = "_set_static_graph should be called before training loop starts."
    assert ranks(2, _set_late_or_twice) == [(late, True)] * 2


def _with_detection(rank: int, how: str) -> None:
    with pytest.warns(UserWarning, match="find_unused_parameters=True does nothing beside static_graph=True"):
        plain, model = _make_static(how, find_unused_parameters=True)
    steps_are_right(plain, model, rank, _skips)
    raises_everywhere(square_loss(model, rank).backward, GraphChangedError)


@hows
def test_detection_is_not_needed_beside_it(ranks, how):
    ranks(2, _with_detection, how)


def _is_static(rank: int) -> list[tuple[bool, int, int]]:
    """What a wrapper that was promised nothing found out."""
    _, model = make(lambda: Scales("a", "b"))
    found = []
    for use in ("a b", "a b", "a", "a b"):
        unused = [] if "b" in use else ["b"]
        model(torch.tensor(1.0), use=use, unused_parameters=unused).backward()
        data = model._get_ddp_logging_data()
        found.append((model.reducer._ddp_graph_static(), data["can_set_static_graph"], data["static_graph"]))
    return found


def test_whether_a_graph_was_static_so_far_can_be_asked(ranks):
    assert ranks(2, _is_static) == [[(True, True, 0)] * 2 + [(False, False, 0)] * 2] * 2


def _under_trust(rank: int) -> list[float | None]:
    """Nobody asks others, so the graphs must be the same; that they do not change is still checked."""
    _, model = make(lambda: Scales("a", "b"), static_graph=True, unused_agreement="trust")
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a").backward()
    assert model.stats().bytes_reduced == 3 * 4
    raises_everywhere(model(torch.tensor(1.0), use="a b").backward, GraphChangedError)
    return grads_of(model)


def test_under_trust_nothing_is_asked(ranks):
    """(6 + 12) / 2"""
    assert ranks(2, _under_trust) == [[9.0, None]] * 2
