"""The scripts of ``proofs/speed`` run, and what they claim of things that are exact holds; no clock is read here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proofs.speed import hosts, model
from proofs.speed.__main__ import MAX_APART, check
from proofs.speed.contenders import BY_NAME, Trainee
from proofs.speed.fake import fake_rank
from proofs.speed.rank import differences, one_step
from proofs.speed.simulated import LAYERS, WIDTH, train
from proofs.speed.workloads import workloads

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_24_layers_have_the_parameters_that_the_table_says():
    """A layer of width w: 4 w^2 + 4 w (attention), 8 w^2 + 5 w (two linear layers), 4 w (norms), in floats."""
    layer = (12 * 256**2 + 13 * 256) * 4
    found = {one.name: one for one in workloads(quick=False, drops=(0.25,))}
    assert found["drop-0.25"].param_bytes == 24 * layer == 75_816_960
    assert found["drop-0.25"].used_bytes == 18 * layer
    assert len(found["drop-0.25"].dropped(7)) == 6
    assert found["fixed"].dropped(1) == found["fixed"].dropped(2)
    assert found["large"].param_bytes == 8 * 16 * 2**20


@pytest.mark.slow
def test_the_table_is_measured_kept_and_printed(tmp_path):
    """Its exit status is 0 if gradients agree and nothing unused was sent."""
    few = ["--workloads", "drop-0.5", "--contenders", "ddp-runs-all", "ddp-find", "known", "--rounds", "2"]
    kept = tmp_path / "kept.json"
    printed = _run("proofs.speed", "--quick", "--silent", "--no-host-time", "--json", str(kept), *few)
    (net,) = json.loads(kept.read_text())["networks"]
    (run,) = net["runs"]
    assert [row["contender"] for row in run["rows"]] == ["plain", "ddp-runs-all", "ddp-find", "known"]
    plain, runs_all, _, known = run["rows"]
    assert known["kept_bytes"] == plain["kept_bytes"] == run["used_bytes"]
    assert runs_all["kept_bytes"] == 2 * run["param_bytes"]  # gradients and buckets
    table = _run("proofs.speed.table", str(kept))
    assert printed.startswith(table)
    counts_ours = "others" not in net["network"]
    assert re.search(rf"^all {2 + counts_ours} exact checks hold\n\Z", printed[len(table) :], re.MULTILINE)


def test_gradients_are_compared_with_averaged_ones_of_the_plain_module():
    """On a fake group of three, whose all-reduces do nothing: thirds. One element of one gradient is enough."""
    (workload,) = (one for one in workloads(quick=True, drops=(0.5,)) if one.name == "drop-0.5")
    with fake_rank(0, 3):
        plain, known = (Trainee(BY_NAME[name], workload, 0, torch.device("cpu")) for name in ("plain", "known"))
        for one in (plain, known):
            one_step(one, 0)
        used = next(p.grad for p in known.module.parameters() if p.grad is not None)
        assert differences([known, plain]) == {"known": 0.0}
        one_step(plain, 0)
        used.view(-1)[3] += 10 * MAX_APART * used.abs().max()
        assert differences([known, plain])["known"] > MAX_APART


def test_what_is_exact_has_bounds_on_both_sides():
    """Four ranks: 2 x 3 / 4 bytes a byte that is used."""

    def wrong(sent, apart=0.0):
        row = {"contender": "known", "wire_bytes": sent}
        run = {"workload": "w", "used_bytes": 10**6, "apart": {"known": apart}, "rows": [row]}
        net = {"network": "loopback", "world_size": 4, "runs": [run]}
        found, checks, unchecked = check({"networks": [net], "machine": {"gpu": None}})
        assert checks == 2 and not unchecked
        return len(found)

    assert [wrong(sent) for sent in (1_499_999, 1_500_000, 1_540_000, 1_560_000)] == [1, 0, 0, 1]
    assert wrong(1_500_000, float("nan")) == wrong(1_500_000, 2 * MAX_APART) == 1


@pytest.mark.slow
def test_growth():
    assert _run("proofs.speed.growth", "--quick", "--silent").endswith("all exact claims hold\n")


def test_simulated_ranks_hear_what_others_declare():
    """Rank r drops layers 0 to r: only layer 0 is dropped by all and skipped."""
    found = train([0, 1, 3], 4, lambda rank, step: frozenset(range(rank + 1)))
    assert [one.gradient_bytes for one in found] == [(LAYERS - 1) * (WIDTH * WIDTH + WIDTH) * 4] * 3
    assert len({one.plans for one in found}) == 1


# -- the step on paper, by hand


def test_an_all_reduce_on_paper():
    """4 ranks: 6 messages of 1 s and 8 / (4 x 2) s each; in a tree 2 x (2 x 1 s + 8 / 2 s)."""
    link = model.Link(alpha=1.0, beta=2.0)
    assert link.all_reduce(8, 4) == 12
    assert link.all_reduce(8, 4, tree=True) == 12
    assert link.all_reduce(8, 2) == 6


def test_a_step_on_paper():
    """2 ranks, alpha 1 s, 1 byte a second: A(b) = 2 + b. Backward of 10 s, buckets of 2 and 8 bytes.

    Ready after 2 and 10 s. Bucket 1: 2 to 6; bucket 2: 10 to 20. With forward 1 s: 21. Messages of 7 bytes take 8 s and
    what sending takes: bucket 1 goes from 8 to 12, bucket 2 from 12 to 22, and 8 s for the closing message: 31. Two
    ranks may swap the last bucket: 1 s less.
    """
    link = model.Link(alpha=1.0, beta=1.0)
    assert model.step(1, 10, [2, 8], link, 2) == 21
    assert model.step(1, 10, [2, 8], link, 2, agreement_bytes=7) == pytest.approx(31 + 2 * model.SENDING_S)
    assert model.step(1, 10, [2, 8], link, 2, swaps=True) == 20
    assert model.step(1, 10, [2, 8], link, 3, swaps=True) == model.step(1, 10, [2, 8], link, 3)


def test_messages_on_paper():
    """4 ranks: 3 messages of 10 bytes to send, one hop; in the ring 6 hops of a quarter each."""
    link = model.Link(alpha=1.0, beta=1.0)
    assert link.message(10, 4) == 1 + 3 * (model.SENDING_S + 10)
    assert link.message(100_000, 4) == 6 * (1 + 25_000)
    assert model.break_even_bytes(link, 2, 10) == pytest.approx(22)  # each byte that is saved saves a second


def test_alpha_and_beta_are_found_again():
    link = model.Link(alpha=1e-4, beta=1e8)
    fitted = model.fit({str(n): link.all_reduce(n, 2) for n in (4, 1000, 10**6, 10**7)}, 2)
    assert fitted.alpha == pytest.approx(link.alpha) and fitted.beta == pytest.approx(link.beta)


# -- two hosts


def test_rates():
    assert hosts.bytes_per_second("100mbit") == 12.5e6
    assert hosts.bytes_per_second("2.5Gbit") == 312.5e6
    with pytest.raises(ValueError, match="a rate looks like"):
        hosts.bytes_per_second("fast")


def test_hosts_are_gone_after_an_interrupt():
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)

    names: list[str] = []

    def standing() -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [name for name in names if name in listed]

    def interrupted() -> None:
        with hosts.two_hosts("1gbit") as made:
            names.extend(made)
            assert len(standing()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert standing() == []
