"""Draws that are the same on every rank and after every restart: the seed and the step decide, and nothing else."""

from __future__ import annotations

import random

from .errors import ArgumentError


class LayerDropSampler:
    """Which layers to drop in a step, each independently with probability ``drop`` (LayerDrop, Fan et al. 2020).

    No state: asking again, on another rank or after a restart, gives the same answer. At least one layer is kept, so
    that the model never shrinks to nothing.

    Args:
        num_layers: how many layers there are.
        drop: probability in [0, 1] of dropping a layer.
        seed: another seed, another sequence.

    Raises:
        ArgumentError: fewer than one layer, or a probability outside [0, 1].
    """

    def __init__(self, num_layers: int, drop: float, seed: int = 0) -> None:
        if num_layers < 1:
            raise ArgumentError(f"num_layers must be at least 1, got {num_layers}")
        if not 0.0 <= drop <= 1.0:
            raise ArgumentError(f"drop is a probability in [0, 1], got {drop}")
        self.num_layers = num_layers
        self.drop = drop
        self.seed = seed

    def dropped(self, step: int) -> tuple[int, ...]:
        """Indices of the layers that step ``step`` leaves out, ascending."""
        draw = random.Random(f"knownddp layer drop, seed {self.seed}, step {step}")
        chosen = [layer for layer in range(self.num_layers) if draw.random() < self.drop]
        if len(chosen) == self.num_layers:
            chosen.remove(draw.randrange(self.num_layers))
        return tuple(chosen)
