"""B1 to B4: what holds of the protocol for any number of ranks, parameters and buckets, tied to the shipped machine by
traces of it, which Coq's kernel computes again or checks the theorems' hypotheses on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from knownddp.messages import HEADER_BYTES, flags_of
from knownddp.outcomes import Fault, Opening
from knownddp.plan import BucketPlan
from knownddp.protocol import Agreement

from ..assigner.inputs import specs_of
from ..claims import ALL_SIZES, Claim, Evidence, Refuted
from ..coqtool import replayed, term, theorems
from .traced import Heard, Run, TracedRank, combined, runs

NUMBER_OF_RUNS: Final = (40, 500)

BUCKETS: Final = """
Definition nats (l : list N) : list nat := map N.to_nat l.
Definition bucket_of (r : list N * bool) : Launch.bucket := Launch.Bucket (nats (fst r)) (snd r).
Definition flag (l : list bool) (p : nat) : bool := nth p l false.
"""
LAUNCH_ROW: Final = "list (list N * bool) * list bool * bool * list N * list N * list N"
LAUNCH: Final = f"""{BUCKETS}
Definition counts (plan : list Launch.bucket) (e : nat -> bool) (w : bool) (early later : list nat) : list nat :=
  map (fun n => next (through plan e w early (firstn n later))) (seq 0 (S (length later))).
Definition ok (r : {LAUNCH_ROW}) : bool :=
  let '(plan, e, w, early, later, answer) := r in
  let computed := counts (map bucket_of plan) (flag e) w (nats early) (nats later) in
  if list_eq_dec Nat.eq_dec computed (nats answer) then true else false.
"""
WINDOW_ROW: Final = (
    "(bool * list (list N * bool) * bool * list N * bool) * (list bool * bool * list N * list N) * list (N * N)"
)
WINDOW: Final = f"""{BUCKETS}
Definition code (t : tag) : N * N :=
  match t with Open => (0, 0) | Bucket k => (1, N.of_nat k) | Close => (2, 0) | Late k => (3, N.of_nat k)
  | Outcome => (4, 0) | Order => (5, 0) | Testimony => (6, 0) end.
Definition same (a b : N * N) : bool := N.eqb (fst a) (fst b) && N.eqb (snd a) (snd b).
Fixpoint all_same (a b : list (N * N)) : bool :=
  match a, b with [], [] => true | x :: a', y :: b' => same x y && all_same a' b' | _, _ => false end.
Definition ok (r : {WINDOW_ROW}) : bool :=
  let '((fails, plan, fails_late, late, order), (e, w, early, later), answer) := r in
  let more := match late with [] => None | n :: _ => Some (N.to_nat n) end in
  let t := Told fails (map bucket_of plan) fails_late more false order in
  all_same (map code (window t (Local (flag e) w (nats early) (nats later)))) answer.
"""
PROGRAM_ROW: Final = "N * list N"
PROGRAM: Final = f"""
Definition act_of (n : N) : act := match n with 0 => Issue | _ => Wait (N.to_nat (n - 1)) end.
Definition ok (r : {PROGRAM_ROW}) : bool := waits_for_own_b (N.to_nat (fst r)) 0 (map act_of (snd r)).
"""
MESSAGE_ROW: Final = "N * list N * bool"
# 8 and 32 bits with their complements, then what OPEN and CLOSE tell of a parameter.
MESSAGE: Final = f"""
Definition any (mask : N) (ms : list N) : bool := negb (N.eqb (N.land (combined ms) mask) 0).
Definition differ (w : N) (vs : list N) : bool :=
  negb (N.eqb (N.land (combined vs) (combined (map (complement w) vs))) 0).
Definition ok (r : {MESSAGE_ROW}) : bool :=
  let '(kind, ms, answer) := r in
  Bool.eqb answer (match kind with
    | 0 => differ 8 ms | 1 => differ 32 ms | 2 => any 3 ms | 3 => any 4 ms && any 8 ms | _ => any 6 ms end).
"""
CODES: Final = {"open": 0, "bucket": 1, "close": 2, "late": 3, "outcome": 4, "order": 5, "testimony": 6}


def traced(quick: bool) -> list[Run]:
    """Runs of the shipped machine. What it raises refutes, but not that it has no such name."""
    try:
        found = list(runs(NUMBER_OF_RUNS[0 if quick else 1]))
    except (AttributeError, NameError):
        raise
    except Exception as error:
        raise Refuted(f"the machine raises {error!r}") from error
    counted = sum(rank.counted for run in found for rank in run.ranks)
    assert counted >= len(found), f"in {len(found)} runs {counted} gradients are only written down"
    return found


def heard(quick: bool) -> Iterator[Heard]:
    return (one for run in traced(quick) for ranks in run.windows for one in ranks)


def _plan_term(plan: BucketPlan | None) -> list[tuple[list[int], bool]]:
    return [(list(bucket.param_indices), bucket.is_held) for bucket in plan.buckets] if plan is not None else []


def _flags(one: Heard) -> list[bool]:
    return [i in one.part.expected for i in range(max((*one.part.expected, *one.part.fires, 0)) + 1)]


def launch_rows(quick: bool) -> list[str]:
    return [
        term(
            (
                _plan_term(one.plan),
                _flags(one),
                one.waits_for_end,
                list(one.early),
                list(one.later),
                one.launched,
            )
        )
        for one in heard(quick)
        if one.plan is not None
    ]


def window_rows(quick: bool) -> list[str]:
    rows = []
    for one in heard(quick):
        closing = one.closing
        late = [len(closing.late_plan.buckets)] if closing is not None and closing.late_plan is not None else []
        told = (
            one.plan is None,
            _plan_term(one.plan),
            closing is not None and closing.fault is not None,
            late,
            closing is not None and closing.order_due,
        )
        local = (_flags(one), one.waits_for_end, list(one.early), list(one.later))
        tags = [tag.split() for tag in one.tags]
        rows.append(term((told, local, [(CODES[tag[0]], int(tag[1]) if tag[1:] else 0) for tag in tags])))
    return rows


def program_rows(quick: bool) -> list[str]:
    """One a rank, all windows in a row. Ranks of a run must issue the same, with the same sizes."""
    rows = []
    for run in traced(quick):
        issues = [[step for step in rank.trace if step[0] == "issue"] for rank in run.ranks]
        for other in issues:
            assert other == issues[0], f"ranks issue {issues[0]} and {other}"
        for rank in run.ranks:
            rows.append(term((len(issues[0]), [0 if s[0] == "issue" else int(s[1]) + 1 for s in rank.trace])))
    return rows


def _open_of(window: int, signature: int, draw: random.Random) -> bytes:
    """What a rank of four parameters may send."""
    rank = TracedRank(specs_of([(1, 0, False)] * 4), [4], Agreement.UNION, False)
    rank.machine.window = window
    some = [tuple(i for i in range(4) if draw.random() < share) for share in (0.5, 0.2, 0.5)]
    return rank.machine.begin(flags_of(some[0], 4), some[1], some[2], signature=signature)


def _told_by_open(message: bytes, agreement: Agreement) -> tuple[Opening, bytes]:
    reader = TracedRank(specs_of([(1, 0, False)] * 4), [4], agreement, False)
    reader.machine.begin(bytes(4))
    opening = reader.machine.opened(message)
    return opening, reader.machine.agreed


def message_rows(quick: bool) -> list[str]:
    """OPEN messages of one to five ranks, as combined by OR and as the shipped machine reads them."""
    draw, rows = random.Random(2), []
    for turn in range(64 if quick else 640):
        world_size = draw.choice((1, 2, 2, 3, 4, 5))
        numbers = [draw.randrange(2**32) for _ in range(2)]
        windows = [draw.choice((numbers[0], numbers[0], numbers[1])) & 0xFF for _ in range(world_size)]
        signatures = [numbers[0]] * world_size
        if draw.random() < 0.7:
            signatures[draw.randrange(world_size)] ^= 1 << turn % 32
        plain = [numbers[0]] * world_size
        for kind, fault in ((0, Fault.CROSSED), (1, Fault.MODELS)):
            sent = [
                _open_of(*pair, draw)
                for pair in zip(
                    windows if kind == 0 else [7] * world_size, plain if kind == 0 else signatures, strict=True
                )
            ]
            opening, _ = _told_by_open(combined(sent), Agreement.UNION)
            rows.append(term((kind, windows if kind == 0 else signatures, opening.fault is fault)))
        sent = [_open_of(7, numbers[0], draw) for _ in range(world_size)]
        opening, agreed = _told_by_open(combined(sent), Agreement.UNION)
        lanes = [list(lane) for lane in zip(*(message[HEADER_BYTES:] for message in sent), strict=True)]
        for i, lane in list(enumerate(lanes))[turn % 4 :: 4 if quick else 1]:
            rows.append(term((2, lane, bool(agreed[i]))))
            rows.append(term((3, lane, i in opening.disputed)))
    return rows


def close_rows(quick: bool) -> list[str]:
    """What CLOSE told of each parameter, against what each rank had fired, carried or called late."""
    rows = []
    for run in traced(quick):
        for ranks in run.windows:
            closing = ranks[0].closing
            if closing is None or closing.fault is not None:
                continue
            for i, touched in enumerate(closing.touched):
                lane = [2 * (i in one.part.fires or i in one.part.carried) for one in ranks]
                if i not in closing.late:  # what is late is touched too, but by whom only the ranks know
                    rows.append(term((4, lane, bool(touched))))
    return rows


def _claim(
    name: str,
    says: str,
    source: str,
    names: tuple[str, ...],
    floor: tuple[int, int],
    *replays: tuple[str, str, Callable[[bool], list[str]]],
) -> Claim:
    """Theorems, and rows that the kernel computes again."""

    def run(quick: bool) -> Evidence:
        theorems(source, names)
        cases = sum(replayed(source, definitions, kind, rows(quick)) for definitions, kind, rows in replays)
        return Evidence(cases, f"{len(names)} theorems for all sizes; cases are traces replayed" if cases else "")

    return Claim(name, says, ALL_SIZES, run, floor, needs_coq=True)


CLAIMS: Final = (
    _claim(
        "B1",
        "what was launched is a prefix of the plan, whatever the order of gradients",
        "Launch",
        ("launched_is_due", "order_is_irrelevant", "every_bucket_in_order"),
        (100, 1500),
        (LAUNCH, LAUNCH_ROW, launch_rows),
    ),
    _claim(
        "B2",
        "combined messages tell exactly what some rank sent, and whether ranks sent different numbers",
        "Protocol",
        ("arrival_is_irrelevant", "some_rank_sent", "complement_tells"),
        (300, 5000),
        (MESSAGE, MESSAGE_ROW, lambda quick: message_rows(quick) + close_rows(quick)),
    ),
    _claim(
        "B3",
        "all ranks issue the same collectives in the same order",
        "Protocol",
        ("common_sequence",),
        (100, 2000),
        (WINDOW, WINDOW_ROW, window_rows),
    ),
    _claim(
        "B4",
        "no rank waits for ever: every run ends, with every rank done",
        "Protocol",
        ("someone_can_go_on", "steps_stay_sound", "every_run_ends_well"),
        (60, 1000),
        (PROGRAM, PROGRAM_ROW, program_rows),
    ),
)
