"""Gradients of some size are packed as soon as they are there, before their bucket is full.

Inputs are rank r -> r + 1, so on two ranks the mean of a gradient that is the input is 1.5. Under "same" what is
expected is known as a backward begins, so that packing does not depend on when messages come.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Fails, make, raises_everywhere
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from knownddp import GradientTakenError, KnownDDP, PeerFailedError
from knownddp.plan import EAGER_BYTES

SIDE = 128  # a float32 matrix of this side is just as large


class Wide(nn.Module):
    """``forward(x)`` is x times the sum of all elements. The backward comes to the weights first, then to the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(SIDE, SIDE))
        self.second = nn.Parameter(torch.ones(SIDE, SIDE))
        self.bias = nn.Parameter(torch.ones(3))
        self.fails = False

    def forward(self, x: float, names: Sequence[str] = ("second", "first"), times: int = 1) -> Tensor:
        """``times``: so often the gradient of each weight comes."""
        bias = Fails.apply(self.bias) if self.fails else self.bias
        total = (bias * x).sum()
        t = torch.tensor(float(x), requires_grad=True)
        for name in names:
            weight = getattr(self, name)
            if times == 1:
                total = total + (weight * x).sum()
            else:
                for _ in range(times):
                    total = total + checkpoint(lambda t, w=weight: (w * t).sum(), t, use_reentrant=True)
        return total


def _values(model: KnownDDP) -> list[float | None]:
    """What all elements of each gradient are."""
    found: list[float | None] = []
    for param in model.parameters():
        found.append(None if param.grad is None else param.grad.flatten()[0].item())
        assert param.grad is None or (param.grad == param.grad.flatten()[0]).all()
    return found


def _learnt(**options: Any) -> KnownDDP:
    """A wrapper that has seen the order of gradients."""
    _, model = make(Wide, unused_agreement="same", **options)
    model(1.0).backward()
    model.zero_grad(set_to_none=True)
    return model


def _packs_early(rank: int, options: dict[str, Any]) -> tuple[list[bool], list[float | None]]:
    model = _learnt(**options)
    module, seen = model.module, []
    handle = module.bias.register_hook(lambda _: seen.extend([module.first.grad is None, module.second.grad is None]))
    model(rank + 1.0).backward()
    handle.remove()
    return seen, _values(model)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.bfloat16}])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_its_memory_is_given_up_before_the_bucket_is_full(ranks, world, options):
    """(1 + ... + N) / N; in bfloat16 thirds are rounded before they are summed, so no third rank there."""
    assert torch.ones(SIDE, SIDE).nbytes == EAGER_BYTES
    if world == 3 and options:
        pytest.skip("thirds are not exact")
    for seen, values in ranks(world, _packs_early, options):
        assert seen == [True, True]
        assert values == pytest.approx([(world + 1) / 2] * 3)


def _comes_again(rank: int) -> list[float | None]:
    model = _learnt()
    model(rank + 1.0, times=3).backward()
    return _values(model)


def test_what_comes_again_before_the_bucket_goes_is_added(ranks):
    """Three times the input for the weights."""
    assert ranks(2, _comes_again) == [[4.5, 4.5, 1.5]] * 2


def _adds_to_what_was_there(rank: int, times: int) -> tuple[list[bool], list[float | None], list[float | None], bool]:
    model = _learnt()
    module, seen = model.module, []
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0)
    before = [param.grad for param in model.parameters()]
    module.fails = rank == 1
    raises_everywhere(
        lambda: model(rank + 1.0, times=times).backward(), ArithmeticError if rank == 1 else PeerFailedError
    )
    restored = _values(model)
    module.fails = False
    handle = module.bias.register_hook(lambda _: seen.extend([module.first.grad is None, module.second.grad is None]))
    model(rank + 1.0, times=times).backward()
    handle.remove()
    is_same = all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    return seen, restored, _values(model), is_same


@pytest.mark.parametrize(("times", "wanted"), [(1, [3.5, 3.5, 3.5]), (2, [5.0, 5.0, 3.5])])
def test_it_is_packed_with_what_was_there_before(ranks, times, wanted):
    """2 stands in each gradient. An error leaves it there; else the mean is added, in the same tensor."""
    for seen, restored, values, is_same in ranks(2, _adds_to_what_was_there, times):
        assert seen == [True, True] and restored == [2.0] * 3
        assert values == wanted and is_same


def _misses(rank: int, names: list[tuple[str, ...]]) -> list[float | None]:
    model = _learnt()
    model(rank + 1.0, names[rank]).backward()
    return _values(model)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([("first",), ("first",)], [1.5, None, 1.5]),
        ([("first",), ("second",)], [0.5, 1.0, 1.5]),
        ([("first", "second"), ()], [0.5, 0.5, 1.5]),
    ],
)
def test_what_does_not_come_counts_as_zero(ranks, names, wanted):
    """The bucket goes when the backward is over. A weight that no rank used has no gradient."""
    assert ranks(2, _misses, names) == [wanted] * 2


def _fails(rank: int) -> list[list[float | None]]:
    model = _learnt()
    model.module.fails = rank == 1
    raises_everywhere(lambda: model(rank + 1.0).backward(), ArithmeticError if rank == 1 else PeerFailedError)
    after = _values(model)
    model.module.fails = False
    model(rank + 1.0).backward()
    return [after, _values(model)]


def test_after_an_error_nothing_of_it_is_left(ranks):
    assert ranks(2, _fails) == [[[None] * 3, [1.5] * 3]] * 2


def _hooked(rank: int) -> list[float | None]:
    model = _learnt()
    model.register_comm_hook(None, allreduce_hook)
    model(rank + 1.0).backward()
    return _values(model)


def test_a_communication_hook_is_given_undivided_gradients(ranks):
    """It divides by itself."""
    assert ranks(2, _hooked) == [[1.5] * 3] * 2


def _accumulates(rank: int) -> list[list[float | None]]:
    """Over two synchronising backwards, and over one that is not and one that is."""
    found = []
    for synchronises in (True, False):
        model = _learnt()
        model.require_backward_grad_sync = synchronises
        model(rank + 1.0).backward()
        model.require_backward_grad_sync = True
        model(rank + 1.0).backward()
        found.append(_values(model))
    return found


def test_gradients_that_stood_there_are_added(ranks):
    assert ranks(2, _accumulates) == [[[3.0] * 3] * 2] * 2


def _used_again(rank: int) -> list[list[float | None]]:
    """Steps on the same flat bucket, each of which leaves other places of it as they are."""
    model, found = _learnt(), []
    for names in (("first", "second"), ("first",), ("second",), ("first", "second")):
        model.module.requires_grad_(True)
        model(rank + 1.0, names if rank == 0 else ("first", "second")).backward()
        found.append(_values(model))
        model.zero_grad(set_to_none=True)
    return found


def test_a_flat_bucket_that_is_used_again_holds_nothing_of_the_last_step(ranks):
    """Rank 1 always uses both: where rank 0 does not, its 2 alone is halved."""
    wanted = [[1.5, 1.5, 1.5], [1.5, 1.0, 1.5], [1.0, 1.5, 1.5], [1.5, 1.5, 1.5]]
    assert ranks(2, _used_again) == [wanted] * 2


def _declares_otherwise(rank: int) -> list[list[float | None]]:
    """Each rank declares another weight, or another one comes than it declared; whenever OPEN is back."""
    _, model = make(Wide)
    found = []
    for step in range(6):
        names = [("second", "first"), ("first",)][(rank + step) % 2]
        declared = [] if len(names) == 2 else ["second"]
        if step >= 4:  # lies: what was declared by all comes on rank 1
            declared, names = ["second"], ("first",) if rank == 0 else ("second", "first")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(declared different|no rank expected)")
            model(rank + 1.0, names, unused_parameters=declared).backward()
        found.append(_values(model))
        model.zero_grad(set_to_none=True)
    return found


def test_ranks_that_declare_differently(ranks):
    """The second weight comes on one rank alone, by turns; in the end late, in a round of its own."""
    wanted = [[1.5, 0.5, 1.5], [1.5, 1.0, 1.5]] * 2 + [[1.5, 1.0, 1.5]] * 2
    assert ranks(2, _declares_otherwise) == [wanted] * 2


def _with_graph(rank: int) -> list[float | None]:
    model = _learnt()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        model(rank + 1.0).backward(create_graph=True)
    return _values(model)


def test_gradients_that_have_a_graph(ranks):
    assert ranks(2, _with_graph) == [[1.5] * 3] * 2


def _half(rank: int) -> list[float | None]:
    _, model = make(lambda: Wide().half(), unused_agreement="same", reduce_dtype=torch.float32)
    for _ in range(2):
        model.zero_grad()
        model(rank + 1.0, times=2).backward()
    return _values(model)


def test_halves_that_come_twice_and_travel_in_single_precision(ranks):
    assert ranks(2, _half) == [[3.0, 3.0, 1.5]] * 2


def _removed(rank: int) -> list[float | None]:
    """After its forward the module holds the weight no more."""
    model = _learnt()
    loss = model(rank + 1.0)
    second, model.module.second = model.module.second, None
    loss.backward()
    first, bias = (param.grad for param in model.parameters())
    assert second is not None
    return [float(first.mean()), float(bias.mean())]


def test_a_parameter_that_was_removed_meanwhile(ranks):
    for found in ranks(2, _removed):
        assert found == [1.5, 1.5]


def _meddles(rank: int, what: str) -> list[float | None]:
    """A hook of the parameter that comes last touches the gradient of the first, which is packed by then."""
    model = _learnt()
    first = model.module.first

    def meddle(_: Tensor) -> None:
        if what == "put":
            first.grad = torch.ones_like(first)
        elif what == "drop":
            first.grad = None
        elif first.grad is not None:
            first.grad.mul_(2)

    handle = model.module.bias.register_post_accumulate_grad_hook(meddle)
    if what == "put":
        assert "first" in raises_everywhere(lambda: model(rank + 1.0).backward(), GradientTakenError)
        handle.remove()
        model.zero_grad(set_to_none=True)
    model(rank + 1.0).backward()
    return _values(model)


@pytest.mark.parametrize("what", ["put", "drop", "scale"])
def test_what_was_packed_is_not_to_be_changed(ranks, what):
    """Another gradient in its place is an error; that it is dropped or scaled has no effect, as in stock."""
    assert ranks(2, _meddles, what) == [[1.5] * 3] * 2
