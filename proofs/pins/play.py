"""One rank's program, played on a real wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp.errors import KnownDDPError, UnfinishedBackwardError

from .model import Raised, Scripted, grads_of, seed_of
from .oracle import Told
from .script import Call, Script, Setup

MIB = 2**20


class Clock:
    """Counts the gradients that came on one rank."""

    def __init__(self) -> None:
        self.came = 0

    def tick(self, _: Tensor) -> None:
        self.came += 1  # also for one that is undefined


def _nothing(_: Tensor) -> None: ...


def wrap(setup: Setup) -> KnownDDP:
    """A wrapper of the scripted module, half of whose parameters have a hook already: the wrapper's is another then."""
    module = Scripted(setup)
    for param in list(module.params)[::2]:
        param.register_post_accumulate_grad_hook(_nothing)
    return KnownDDP(
        module,
        init_sync=setup.checks,
        bucket_cap_mb_list=[cap / MIB for cap in setup.caps],
        find_unused_parameters=setup.finds_unused,
        static_graph=setup.is_static,
        unused_agreement=setup.agreement,
    )


def play(script: Script, rank: int, clock: Clock) -> list[Told]:
    """Run the program of ``rank``; returns what came of each backward, and of each forward that raised."""
    model = wrap(script.setup)
    module = model.module
    assert isinstance(module, Scripted)
    params = list(module.params)
    for param in params:
        param.register_hook(clock.tick)  # before the wrapper's hook
    told: list[Told] = []

    @contextlib.contextmanager
    def telling(what: str) -> Iterator[None]:
        outcome = ""
        try:
            yield
        except (KnownDDPError, Raised) as error:
            outcome = type(error).__name__
        if outcome or what == "backward":
            told.append(Told(what, outcome, grads_of(params)))

    setup = script.setup
    joining = model.join(setup.divides_by_initial) if setup.joins else contextlib.nullcontext()
    with joining:
        run(model, params, script, rank, telling)
    if setup.joins:
        told.append(Told("join", "", grads_of(params)))
    return told


Telling = Callable[[str], contextlib.AbstractContextManager[None]]


def run(model: KnownDDP, params: list[nn.Parameter], script: Script, rank: int, telling: Telling) -> None:
    """All steps of the program."""
    for at, step in enumerate(script.programs[rank]):
        if step.zeroes:
            model.zero_grad(set_to_none=True)
        outputs = [forward(model, params, call, seed_of(rank, at, i), telling) for i, call in enumerate(step.calls)]
        for backward in step.backwards:
            chosen = [outputs[i] for i in backward]
            if not chosen:
                continue
            with telling("backward"):
                total = chosen[0]
                for one in chosen[1:]:
                    total = total + one
                torch.autograd.backward(total, retain_graph=len(step.backwards) > 1)
                del total
            del chosen
        del outputs


def forward(
    model: KnownDDP,
    params: list[nn.Parameter],
    call: Call,
    seed: int,
    telling: Telling,
) -> Tensor:
    """One call. A promise that nobody kept raises here; then it is tried again."""
    with contextlib.nullcontext() if call.synchronises else model.no_sync():
        unused = [params[i] for i in sorted(call.declared)]
        try:
            return model(call, seed, unused_parameters=unused)  # type: ignore[no-any-return]
        except UnfinishedBackwardError as error:
            with telling("forward"):
                raise error
            return model(call, seed, unused_parameters=unused)
