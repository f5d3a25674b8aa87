"""Declaring what a call will not use: every way to say it, how long it holds, and what a wrong one costs.

Expected gradients come from plain autograd on one process or are worked out in the docstring. How ranks agree about
declarations that differ is in ``test_unused_agreement.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from models import Scales, Skippable, assert_grads, inputs, make
from steps import (
    declares,
    grads_of,
    setups,
    square_loss,
    step_is_right,
    steps_are_right,
)
from torch import Tensor, nn

from knownddp import DeclarationError, KnownDDP, UnknownParameterError

# One layer of ``Skippable`` is 3 * 3 + 3 floats of 4 bytes.
LAYER_BYTES = 48


# -- ways to declare


class _Drawing(Skippable):
    """Draws its layers inside forward, as a model does whose caller knows nothing of it."""

    draw: Callable[[], Collection[int]] = staticmethod(lambda: ())

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Tensor:
        return super().forward(x, skip=self.draw() or skip)


def _params(model: KnownDDP, skip: Collection[int]) -> list[Tensor]:
    return [p for layer in model.module.of(skip) for p in layer.parameters()]


def _names(skip: Collection[int]) -> list[str]:
    return [f"layers.{i}.{kind}" for i in skip for kind in ("weight", "bias")]


def _argument(make_argument: Callable[[KnownDDP, Collection[int]], Any]) -> Callable[..., Tensor]:
    def run(model: KnownDDP, x: Tensor, skip: Collection[int]) -> Tensor:
        return model(x, skip=skip, unused_parameters=make_argument(model, skip))

    return run


def _with_block(model: KnownDDP, x: Tensor, skip: Collection[int]) -> Tensor:
    with model.unused(model.module.of(skip)):
        return model(x, skip=skip)


def _nested_blocks(model: KnownDDP, x: Tensor, skip: Collection[int]) -> Tensor:
    """Each adds to what is around it, and the call's own declaration to both."""
    first, *others = [*skip, None]
    with model.unused([] if first is None else [f"layers.{first}.bias"]), model.unused(_names(i for i in others if i)):
        return model(x, skip=skip, unused_parameters=[] if first is None else [f"layers.{first}.weight"])


def _inside_forward(model: KnownDDP, x: Tensor, skip: Collection[int]) -> Tensor:
    def draw() -> Collection[int]:
        for i in skip:
            model.mark_unused([model.module.layers[i]])
        return skip

    model.module.draw = draw
    try:
        return model(x)
    finally:
        del model.module.draw


def _after_forward(model: KnownDDP, x: Tensor, skip: Collection[int]) -> Tensor:
    y = model(x, skip=skip)
    model.mark_unused(_names(skip))
    return y


WAYS = {
    "list": _argument(_params),
    "tuple": _argument(lambda m, skip: tuple(_params(m, skip))),
    "set": _argument(lambda m, skip: set(_params(m, skip))),
    "generator": _argument(lambda m, skip: (p for p in _params(m, skip))),
    "dictionary": _argument(lambda m, skip: dict.fromkeys(_names(skip))),
    "names": _argument(lambda m, skip: _names(skip)),
    "module-names": _argument(lambda m, skip: [f"layers.{i}" for i in skip]),
    "globs": _argument(lambda m, skip: [f"layers.[{''.join(map(str, skip))}].*"] if skip else []),
    "modules": _argument(lambda m, skip: m.module.of(skip)),
    "module-list": _argument(lambda m, skip: nn.ModuleList(m.module.of(skip))),
    "mixture": _argument(lambda m, skip: [*m.module.of(list(skip)[:1]), *_names(list(skip)[1:]), *_params(m, skip)]),
    "with-block": _with_block,
    "nested-blocks": _nested_blocks,
    "inside-forward": _inside_forward,
    "after-forward": _after_forward,
}
SKIPS = [{1}, set(), {0, 3}, {2, 3}, {1}, {0, 1, 2}]


def _declared_in(rank: int, way: str, cap: float | None) -> tuple[int, int]:
    plain, model = make(_Drawing, bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        x, skip = inputs(r, 5, 3, seed=step), SKIPS[step]
        y = WAYS[way](module, x, skip) if isinstance(module, KnownDDP) else module(x, skip=skip)
        return y.square().mean()

    steps_are_right(plain, model, rank, loss_of, steps=len(SKIPS))
    return model.stats().bytes_reduced, model.stats().bytes_skipped


@pytest.mark.parametrize("way", WAYS)
@setups
def test_declared_layers_get_no_gradient_and_cost_nothing_and_all_others_get_the_mean(ranks, world_size, cap, way):
    """In six steps of four layers 1 + 0 + 2 + 2 + 1 + 3 = 9 are skipped and 24 - 9 = 15 reduced."""
    assert ranks(world_size, _declared_in, way, cap) == [(15 * LAYER_BYTES, 9 * LAYER_BYTES)] * world_size


class _Greedy(Skippable):
    """Takes any keyword argument."""

    def forward(self, x: Tensor, skip: Collection[int] = (), **others: Any) -> Tensor:  # type: ignore[override]
        assert not others, others
        return super().forward(x, skip=skip)


def _not_passed_on(rank: int) -> None:
    _, model = make(_Greedy)
    model(inputs(rank, 5, 3), skip={1}, unused_parameters=["layers.1"]).sum().backward()


def test_the_declaration_is_not_passed_on_to_the_module(ranks):
    ranks(2, _not_passed_on)


def _nothing_declared(rank: int, cap: float | None) -> int:
    plain, model = make(bucket_cap_mb=cap)
    ways = [{}, {"unused_parameters": []}, {"unused_parameters": None}, {}, {"unused_parameters": iter(())}]

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return square_loss(module, r, step, **(ways[step] if isinstance(module, KnownDDP) else {}))

    steps_are_right(plain, model, rank, loss_of, steps=len(ways))
    return model.stats().bytes_skipped


@setups
def test_declaring_nothing_in_any_way_skips_nothing(ranks, world_size, cap):
    assert ranks(world_size, _nothing_declared, cap) == [0] * world_size


# -- refused


def _refused(rank: int, wrong: Any, kind: type[Exception], says: str) -> None:
    """The error comes before the module runs, on rank 1 alone, which then calls again."""
    plain, model = make()
    foreign = nn.Linear(3, 3)
    entries = {"foreign module": [foreign], "foreign parameter": [foreign.weight], "copy": [plain.layers[0].weight]}
    if isinstance(wrong, str) and wrong in entries:
        wrong = entries[wrong]
    ran: list[int] = []
    model.module.register_forward_pre_hook(lambda *_: ran.append(rank))
    for step in range(2):
        if rank == 1:
            with pytest.raises(kind, match=says):
                model(inputs(rank, 5, 3), unused_parameters=wrong)
            assert ran == []
        step_is_right(plain, model, rank, step)
        ran.clear()


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ("layers.1", DeclarationError, "iterable"),
        (5, DeclarationError, "iterable"),
        ([5], DeclarationError, "int"),
        (["layers.9"], UnknownParameterError, r"'layers\.9'.*\n?.*'layers\.\d'"),
        (["layers.[7-9].*"], UnknownParameterError, "matches no"),
        ("foreign module", UnknownParameterError, "Linear"),
        ("foreign parameter", UnknownParameterError, r"\(3, 3\)"),
        ("copy", UnknownParameterError, "copy"),
    ],
    ids=["text", "number", "number-inside", "unknown-name", "empty-glob", "module", "parameter", "copy"],
)
def test_an_entry_that_is_no_part_of_the_module_raises_at_once_and_disturbs_nothing(ranks, wrong, kind, says):
    ranks(2, _refused, wrong, kind, says)


def _marked_at_a_wrong_time(rank: int) -> None:
    plain, model = make()

    def is_refused() -> None:
        with pytest.raises(DeclarationError, match="found no call to mark"):
            model.mark_unused(["layers.1"])

    is_refused()  # before the first call
    y = model(inputs(rank, 5, 3))
    y.sum().backward()
    is_refused()  # the backward was
    model(inputs(rank, 5, 3))
    is_refused()  # the output is gone
    with torch.no_grad():
        model(inputs(rank, 5, 3))
    is_refused()  # that call left nothing to mark
    with pytest.raises(UnknownParameterError):
        model.mark_unused(["layers.9"])
    step_is_right(plain, model, rank)


def test_marking_without_a_call_to_mark_is_refused_and_disturbs_nothing(ranks):
    ranks(2, _marked_at_a_wrong_time)


def _marked_too_late(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    loss = model(torch.tensor(6.0 * (rank + 1)), use="a b")

    def mark(_: Tensor) -> None:
        with pytest.raises(DeclarationError, match="found no call to mark"):
            model.mark_unused(["b"])

    loss.register_hook(mark)
    loss.backward()
    return grads_of(model)


def test_marking_inside_the_backward_is_refused(ranks):
    """x is 6 and 12 for both: (6 + 12) / 2."""
    assert ranks(2, _marked_too_late) == [[9.0, 9.0]] * 2


# -- how long a declaration holds


class _Failing(Skippable):
    def forward(self, x: Tensor, skip: Collection[int] = (), fail: bool = False) -> Tensor:  # type: ignore[override]
        if fail:
            raise ValueError("bad batch")
        return super().forward(x, skip)


def _forward_fails(model: KnownDDP, rank: int, step: int) -> object:
    with pytest.raises(ValueError, match="bad batch"):
        square_loss(model, rank, step, skip={0, 1}, fail=True, unused_parameters=["layers.0", "layers.1"])
    return None


def _block_fails(model: KnownDDP, rank: int, step: int) -> object:
    with pytest.raises(ValueError, match="bad batch"), model.unused(["layers.0"]):
        square_loss(model, rank, step, skip={0}, fail=True)
    return None


def _without_grad(model: KnownDDP, rank: int, step: int) -> object:
    with torch.no_grad():
        return square_loss(model, rank, step, skip={0, 1}, unused_parameters=["layers.0", "layers.1"])


def _output_dropped(model: KnownDDP, rank: int, step: int) -> object:
    square_loss(model, rank, step, skip={0, 1}, unused_parameters=["layers.0", "layers.1"])
    return None


def _output_kept(model: KnownDDP, rank: int, step: int) -> object:
    return square_loss(model, rank, step, skip={0, 1}, unused_parameters=["layers.0", "layers.1"])


def _followed_by_a_plain_step(rank: int, before: Callable[..., object], cap: float | None) -> tuple[int, int]:
    plain, model = make(_Failing, bucket_cap_mb=cap)
    for step in range(3):
        kept = before(model, rank, step)
        step_is_right(plain, model, rank, step)
        del kept
    return model.stats().bytes_skipped, model.stats().late_rounds


@pytest.mark.parametrize("before", [_forward_fails, _block_fails, _without_grad, _output_dropped, _output_kept])
@setups
def test_a_declaration_holds_for_one_call_only(ranks, world_size, cap, before):
    """Nothing is skipped in the step after it, and nothing comes unexpectedly."""
    assert ranks(world_size, _followed_by_a_plain_step, before, cap) == [(0, 0)] * world_size


# -- wrong declarations


def _declared_but_used(rank: int, users: Collection[int], cap: float | None) -> int:
    """All ranks declare layer 1; ``users`` run it all the same."""
    plain, model = make(bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return square_loss(module, r, step, skip=() if r in users else {1}, **declares(module, ["layers.1"]))

    with pytest.warns(UserWarning, match=r"no rank expected: layers\.1\.weight, layers\.1\.bias\. "):
        step_is_right(plain, model, rank, 0, loss_of)
    steps_are_right(plain, model, rank, loss_of, steps=2)  # said once
    return model.stats().late_rounds


@pytest.mark.parametrize("users", [{0}, {1}, {0, 1, 2}], ids=["rank-0", "rank-1", "all"])
@setups
def test_what_was_declared_but_used_is_averaged_in_a_late_round(ranks, world_size, cap, users):
    """One late round in each of three steps, on every rank."""
    assert ranks(world_size, _declared_but_used, users, cap) == [3] * world_size


def _late_by_hand(rank: int) -> tuple[list[float | None], int, int]:
    _, model = make(lambda: Scales("a", "b", "c"))
    use = "a b" if rank == 1 else "a"
    with pytest.warns(UserWarning, match=r"no rank expected: b\. "):
        model(torch.tensor(6.0 * (rank + 1)), use=use, unused_parameters=["b", "c"]).backward()
    return grads_of(model), model.stats().bytes_reduced, model.stats().bytes_skipped


def test_a_late_gradient_of_one_rank_costs_its_bytes_and_no_others(ranks):
    """x is 6 and 12. a: (6 + 12) / 2; b, on rank 1 alone: 12 / 2. Sent: a and, late, b; left out: c."""
    assert ranks(2, _late_by_hand) == [([9.0, 6.0, None], 8, 4)] * 2


def _late_joins(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b", "c"))
    for param in model.parameters():
        param.grad = torch.tensor(60.0 * (rank + 1))
    held = [param.grad for param in model.parameters()]
    with pytest.warns(UserWarning, match=r"no rank expected: b\. "):
        model(torch.tensor(6.0), use="a b" if rank == 1 else "a", unused_parameters=["b", "c"]).backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    return grads_of(model)


def test_a_late_gradient_joins_what_stood_in_grad_on_every_rank(ranks):
    """60 and 120 stood there. a: (66 + 126) / 2; b, used by rank 1 alone: (60 + 126) / 2; c stays."""
    assert ranks(2, _late_joins) == [[96.0, 93.0, 60.0], [96.0, 93.0, 120.0]]


def _names_each(rank: int) -> list[list[str]]:
    _, model = make(lambda: Scales("a", "b", "c"))
    found = []
    for late in ("b", "b", "b c", "c"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(torch.tensor(6.0), use="a " + late, unused_parameters=["b", "c"]).backward()
        found.append([str(one.message).split("expected: ")[1].split(". ")[0] for one in seen])
    return found


def test_each_that_came_late_is_named_once(ranks):
    assert ranks(2, _names_each) == [[["b"], [], ["c"], []]] * 2


def _everything_then_nothing(rank: int, cap: float | None) -> tuple[int, int]:
    plain, model = make(bucket_cap_mb=cap)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        x = inputs(rank, 5, 3, seed=step).requires_grad_()
        model(x, skip=range(4), unused_parameters=list(model.module.parameters())).sum().backward()
        assert torch.equal(x.grad, torch.ones(5, 3))
        assert all(p.grad is None for p in model.parameters())
        step_is_right(plain, model, rank, step)
    return model.stats().bytes_reduced, model.stats().bytes_skipped


@setups
def test_a_call_that_declares_everything_ends_and_the_next_call_is_right(ranks, world_size, cap):
    """Three times four layers skipped, three times four reduced."""
    assert ranks(world_size, _everything_then_nothing, cap) == [(12 * LAYER_BYTES, 12 * LAYER_BYTES)] * world_size


# -- the oracle itself


def test_the_ways_skip_what_the_oracle_skips():
    """A step that skips layers gives them no gradient in the oracle, so that ``assert_grads`` asks for none."""
    plain = Skippable()
    plain(inputs(0, 5, 3), skip={1}).sum().backward()
    assert plain.layers[1].weight.grad is None
    assert plain.layers[0].weight.grad is not None
    with pytest.raises(AssertionError, match="has a gradient where no rank has one"):
        assert_grads(plain, dict.fromkeys(dict(plain.named_parameters())))
