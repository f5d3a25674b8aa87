"""Optimizers that step inside backward (``_apply_optimizer_in_backward``): after the mean, not before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from . import _torch_private as private


class BackwardOptimizers:
    """Steps the optimizers that parameters carry when their gradients have been averaged, and clears these gradients.

    Torch's own hooks would step as soon as this rank's gradient is there. They are taken off; parameters that the
    wrapper does not manage keep theirs.
    """

    def __init__(self) -> None:
        self._has_any = False
        self._known = 0  # how many such optimizers the process had when this last looked

    def adopt(self, live: Sequence[nn.Parameter | None]) -> None:
        """Take over those of the managed parameters, if any was attached since the last call."""
        known = private.count_in_backward_hooks()
        if known == self._known:
            return
        self._known = known
        for param in live:
            if param is not None and private.in_backward_optimizers(param):
                private.remove_in_backward_hooks(param)
                self._has_any = True

    def step(self, live: Sequence[nn.Parameter | None], touched: bytes) -> None:
        """Step those of the parameters that any rank has ``touched`` in this window."""
        if not self._has_any:
            return
        for i, param in enumerate(live):
            if param is None or not touched[i] or param.grad is None:
                continue
            optimizers = private.in_backward_optimizers(param)
            for optimizer in optimizers:
                optimizer.step()
            if optimizers:
                param.grad = None
