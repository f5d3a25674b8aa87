"""The gradients of one rank, as whole numbers in which every firing has a digit of its own.

The duty of ``GradientExchange`` (exchange.py), which holds tensors, in numbers: take what stood in ``.grad`` when a
window begins, pack a bucket from what came and what stood there, and hand back means, or what stood there. A mean is
exact here, so that it shows each firing that went into it, and how often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from knownddp.plan import BucketSpec

MAX_REPEATS = 3  # firings of one parameter in one backward
MAX_RANKS = 5
ONE = 60**7  # a firing: divisible by 2 to 5 ranks, seven times over ...
DIGIT_BITS = 56  # ... and a digit holds the sum of many

Grad = int | None


def firing(rank: int, place: int, repeat: int) -> int:
    """The gradient of a parameter at its ``repeat``-th firing in the ``place``-th step of a rank's program."""
    assert repeat < MAX_REPEATS and rank < MAX_RANKS
    return ONE << (DIGIT_BITS * ((place * MAX_REPEATS + repeat) * MAX_RANKS + rank))


def plus(one: Grad, other: Grad) -> Grad:
    """Their sum; None is no gradient."""
    return other if one is None else one if other is None else one + other


class Gradients:
    """All ``.grad`` of one rank, and in a window what ``GradientExchange`` keeps of them."""

    def __init__(self, num_params: int) -> None:
        self.grads: list[Grad] = [None] * num_params
        self.held_back: list[Grad] = []
        self.flights: list[BucketSpec] = []
        self._on_time: list[BucketSpec] = []  # when the late round has begun
        self._earlier: dict[int, int] = {}
        self._travelled: set[int] = set()
        self.contributes = True

    def begin(self, *, contributes: bool) -> None:
        """What stands in ``.grad`` is held back."""
        self.held_back, self.grads = self.grads, [None] * len(self.grads)
        self.flights, self._travelled = [], set()
        self.contributes = contributes

    def has_left(self, i: int) -> bool:
        """Whether the bucket of the parameter was launched."""
        return i in self._travelled

    def pack(self, bucket: BucketSpec) -> tuple[int, ...]:
        """A rank's share: what came and, the first time, what stood there; zeros where neither is."""
        share = []
        for i in bucket.param_indices:
            stood = self.held_back[i] if self.contributes and i not in self._travelled else None
            share.append(plus(self.grads[i], stood) or 0)
            self.grads[i] = None
            self._travelled.add(i)
        self.flights.append(bucket)
        return tuple(share)

    def pack_nothing(self, bucket: BucketSpec) -> tuple[int, ...]:
        """The share of a rank whose backward failed."""
        self.flights.append(bucket)
        return (0,) * len(bucket.param_indices)

    def late_round(self) -> None:
        """Buckets packed from now on are late."""
        self._on_time, self.flights = self.flights, []

    def hand_back(
        self,
        sums: Sequence[Sequence[int]],
        late_sums: Sequence[Sequence[int]] | None,
        divisor: int,
        touched: bytes,
        late: Collection[int],
    ) -> None:
        """What came back for each bucket, and for those of the late round if there was one."""
        earlier = self._earlier = dict[int, int]()
        on_time, in_late_round = (self.flights, []) if late_sums is None else (self._on_time, self.flights)
        for i, total in _by_param(on_time, sums):
            if i in late:
                earlier[i] = _mean(total, divisor)
            else:
                self.grads[i] = _mean(total, divisor) if touched[i] else self.held_back[i]
        for i, before in enumerate(self.held_back):
            if before is not None and i not in self._travelled and i not in late:
                self.grads[i] = before
        for i, total in _by_param(in_late_round, late_sums or ()):
            self.grads[i] = earlier.get(i, 0) + _mean(total, divisor)

    def keep_late_ones_local(self, late: Collection[int]) -> None:
        """Under "trust" nobody else knows of them: they stay this rank's own, added to what is there."""
        for i in late:
            self.grads[i] = plus(self._earlier.get(i, self.held_back[i]), self.grads[i])

    def release(self) -> None:
        """The window is over."""
        self.held_back, self.flights, self._on_time, self._travelled, self._earlier = [], [], [], set(), {}

    def restore(self) -> None:
        """Everything as it was when the window began."""
        self.grads = list(self.held_back)


def _by_param(buckets: Sequence[BucketSpec], sums: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for bucket, totals in zip(buckets, sums, strict=True):
        yield from zip(bucket.param_indices, totals, strict=True)


def _mean(total: int, divisor: int) -> int:
    mean, rest = divmod(total, divisor)
    assert not rest, "a gradient took part in too many means"
    return mean
