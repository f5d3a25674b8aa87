"""Gradients that came: what hooks on them write down and the reducer reads.

[Note: patience] Most gradients decide nothing: their bucket waits for others still. So a hook writes down whose came
and counts down; what came is looked at together when the count is at zero. It starts at one more than what the
next bucket waits for (``WindowProtocol.patience``). A gradient fills at most one place there, so that bucket cannot be
full before, and goes with the very gradient that follows the one that fills it, in whatever order they come (once OPEN
is back; large ones, which are settled as they come, with themselves). There is no lock: hooks count on one thread, as
the engine runs them where all parameters lie on one device. Elsewhere each gradient is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# Called with the parameter whose gradient came last, and that gradient if the hook was told it.
Look = Callable[[Tensor, Tensor | None], None]


class Arrivals:
    """Parameters whose gradients came since they were last looked at, in order; one that came twice is there twice."""

    def __init__(self) -> None:
        self._came: list[Tensor] = []
        self._patience = [1]  # a list, so that hooks reach it without a look-up

    def hooks(
        self, look: Callable[[], Look | None], on_undefined: Callable[[], Callable[[Tensor], None] | None]
    ) -> tuple[Callable[[Tensor, Tensor | None], None], Callable[[Tensor], None]]:
        """What a hook calls that is told a gradient, with the parameter; and a hook that is told the parameter alone.

        Args:
            look: a weak reference to what is called when it is time to look.
            on_undefined: one to what is called with a parameter that got no gradient.
        """
        append, patience = self._came.append, self._patience

        def note(param: Tensor, grad: Tensor | None) -> None:
            append(param)
            patience[0] = left = patience[0] - 1
            if left <= 0 and (alive := look()) is not None:
                alive(param, grad)

        def hook(param: Tensor) -> None:
            if param.grad is None and param.requires_grad:  # frozen since the forward it counts as zero
                if (alive := on_undefined()) is not None:
                    alive(param)
                return
            append(param)  # as in ``note``: a call would cost as much again
            patience[0] = left = patience[0] - 1
            if left <= 0 and (alive_too := look()) is not None:
                alive_too(param, None)

        return note, hook

    def notes(self, param: Tensor) -> bool:
        """Write down one whose gradient is settled, if it need not be looked at now: no bucket can be full yet.

        Patience allows for one gradient after that which fills a bucket. A settled one needs none after it, so it is
        time to look when two are left.
        """
        if self._patience[0] <= 2:
            return False
        self._came.append(param)
        self._patience[0] -= 1
        return True

    def take(self) -> list[Tensor]:
        """What came since the last call."""
        came = self._came[:]
        del self._came[: len(came)]
        return came

    def wait_for(self, number: int) -> None:
        """Look at the gradient of that number from now on; 1 is the next."""
        self._patience[0] = number
