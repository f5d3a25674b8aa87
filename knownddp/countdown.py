"""How many gradients each bucket still waits for: what the protocol and the hooks on gradients share.

[Note: counting] Most gradients decide nothing: their bucket waits for others still. A hook counts a small one by itself
(``counts``, which ``nodes.py`` has written out, as a call costs more than what it does); all others go through
``WindowProtocol.ready``. The lists stay the same objects, so that hooks reach them without a look-up. There is no lock:
hooks count by themselves only where all parameters lie on one device, as the engine then runs them on one thread.
"""

from __future__ import annotations

from .plan import NOT_PLACED


class Countdown:
    """One window's counts.

    Attributes:
        slots: for each parameter the position of the bucket for which its next gradient counts; ``NOT_PLACED`` if it
            does not just count (none is expected, it came already, no window is open nor a backward that stays local).
        left: for each bucket how many gradients it waits for.
        fired: a byte for each parameter, 1 once a gradient came.
    """

    __slots__ = ("_nothing", "fired", "left", "slots")

    def __init__(self, num_params: int) -> None:
        self._nothing = [NOT_PLACED] * num_params
        self.slots = list(self._nothing)
        self.left: list[int] = []
        self.fired = bytearray(num_params)

    def reset(self) -> None:
        """Nothing has fired, and nothing counts."""
        self.stop()
        self.fired[:] = bytes(len(self.fired))

    def stop(self) -> None:
        """No gradient counts any more by itself."""
        self.slots[:] = self._nothing

    def count_all(self) -> None:
        """After ``reset``, while no window is open: the first gradient of each parameter just counts."""
        self.left[:] = [len(self.slots) + 1]
        self.slots[:] = [0] * len(self.slots)

    def counts(self, param_index: int) -> bool:
        """Count a gradient after which its bucket waits for more; False if there is more to it."""
        bucket = self.slots[param_index]
        if bucket < 0 or self.left[bucket] < 2:
            return False
        self.slots[param_index] = NOT_PLACED
        self.left[bucket] -= 1
        self.fired[param_index] = 1
        return True
