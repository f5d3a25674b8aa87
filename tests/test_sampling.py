"""Draws that seed and step alone decide."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
import torch

from knownddp import ArgumentError, LayerDropSampler

SAMPLER = LayerDropSampler(12, 0.4, seed=3)
STEPS = range(2000)


def test_another_process_draws_the_same():
    """Not even the hash seed of strings matters, which differs between processes."""
    program = (
        "from knownddp import LayerDropSampler; print([LayerDropSampler(12, 0.4, 3).dropped(s) for s in range(50)])"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == str([SAMPLER.dropped(step) for step in range(50)])


def test_a_draw_is_no_function_of_the_draws_before_it():
    forwards = [SAMPLER.dropped(step) for step in range(50)]
    assert [SAMPLER.dropped(step) for step in reversed(range(50))] == forwards[::-1]
    assert SAMPLER.dropped(7) == SAMPLER.dropped(7) == LayerDropSampler(12, 0.4, seed=3).dropped(7)


def test_drawing_leaves_the_global_generators_alone():
    before = random.getstate(), torch.get_rng_state()
    SAMPLER.dropped(0)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_seed_and_step_change_the_draw():
    """By chance alone two draws of 12 layers agree with probability (0.6^2 + 0.4^2)^12 = 0.52^12 < 0.0004."""
    of_steps = [SAMPLER.dropped(step) for step in range(50)]
    of_seeds = [LayerDropSampler(12, 0.4, seed).dropped(0) for seed in range(50)]
    for draws in (of_steps, of_seeds):
        assert sum(a != b for a, b in itertools.pairwise(draws)) >= 48


def test_draws_are_ascending_indices_of_layers():
    for step in STEPS:
        dropped = SAMPLER.dropped(step)
        assert dropped == tuple(sorted(set(dropped))) and set(dropped) <= set(range(12))


@pytest.mark.parametrize("layer", range(12))
def test_each_layer_is_dropped_with_the_probability_asked_for(layer):
    """2000 draws at 0.4: mean 800, standard deviation sqrt(2000 * 0.4 * 0.6) = 21.9; six of them are 131."""
    count = sum(layer in SAMPLER.dropped(step) for step in STEPS)
    assert abs(count - 800) <= 131


def test_layers_are_dropped_independently():
    """Both of two layers with 0.16 over 2000 draws: mean 320, standard deviation sqrt(2000 * 0.16 * 0.84) = 16.4."""
    for one, other in [(0, 1), (0, 11), (5, 6)]:
        count = sum({one, other} <= set(SAMPLER.dropped(step)) for step in STEPS)
        assert abs(count - 320) <= 98


def test_at_least_one_layer_is_kept_and_any_may_be_the_one():
    """drop=1 leaves one of 3 layers; over 300 draws each is left 100 times, standard deviation 8.2."""
    sampler = LayerDropSampler(3, 1.0)
    kept = [set(range(3)).difference(sampler.dropped(step)) for step in range(300)]
    assert all(len(one) == 1 for one in kept)
    assert all(abs(kept.count({layer}) - 100) <= 49 for layer in range(3))


def test_the_ends_of_the_range():
    assert LayerDropSampler(5, 0.0).dropped(0) == ()
    assert LayerDropSampler(1, 1.0).dropped(0) == ()


@pytest.mark.parametrize(
    ("num_layers", "drop", "message"),
    [
        (0, 0.5, "num_layers must be at least 1, got 0"),
        (4, -0.1, r"probability in \[0, 1\], got -0.1"),
        (4, 1.1, r"probability in \[0, 1\], got 1.1"),
        (4, float("nan"), "got nan"),
    ],
)
def test_what_makes_no_sense_is_refused(num_layers, drop, message):
    with pytest.raises(ArgumentError, match=message):
        LayerDropSampler(num_layers, drop)
