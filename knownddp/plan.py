"""Which parameters travel in which bucket, in launch order, and the memory of plans already made.

A plan is a pure function of the agreed set, the parameters' sizes, dtypes and devices, the size limits, and what was
learnt: an order, or that there is none yet, and which parameters are held back. All of that is the same on every rank,
as it comes from the model, from options and from combined messages. So every rank makes the same plan without asking.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .buckets import Item, assign
from .errors import InternalError
from .specs import BucketKey, ParamSpec

# 2^L sets exist for L layers; a run that cycles through few of them finds each again, others cost one plan a step.
MAX_CACHED_PLANS = 64

NOT_PLACED = -1

# A gradient this large travels alone on the CPU, so that it needs not be copied. On accelerators a kernel on another
# stream may still read the memory in which it came, of which no count tells.
ALONE_BYTES = 4 * 2**20

# Buckets of a plan of as many bytes may have sizes of their own: where much is sent it pays to begin soon.
MUCH_BYTES = 16 * 2**20

# One this large is packed as soon as it is there, while it is in the processor's cache; smaller ones together.
EAGER_BYTES = 64 * 2**10


def travels_alone(spec: ParamSpec) -> bool:
    """Whether a dense gradient has a bucket of its own."""
    return spec.nbytes >= ALONE_BYTES and spec.key.device.type == "cpu"


class BucketSpec(NamedTuple):
    """One planned bucket.

    ``is_held`` buckets are launched only when the backward is over: their gradients may change until then.
    """

    param_indices: tuple[int, ...]
    is_sparse: bool
    is_held: bool


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of one agreed set, in launch order.

    A value: no tensors, no process group. ``bucket_of[param_index]`` is the position of the parameter's bucket, or
    ``NOT_PLACED``. ``is_learnt``: its order is one that a backward showed; buckets before and after have nothing in
    common. Ranks whose plans differ must not train.
    """

    num_params: int
    buckets: tuple[BucketSpec, ...]
    is_learnt: bool = False
    bucket_of: tuple[int, ...] = field(init=False)
    members: tuple[int, ...] = field(init=False)
    sizes: tuple[int, ...] = field(init=False)  # parameters in each bucket

    def __post_init__(self) -> None:
        bucket_of = [NOT_PLACED] * self.num_params
        members: list[int] = []
        for position, bucket in enumerate(self.buckets):
            members += bucket.param_indices
            for param_index in bucket.param_indices:
                bucket_of[param_index] = position
        if len(members) != self.num_params - bucket_of.count(NOT_PLACED) or min(members, default=0) < 0:
            raise InternalError(f"a plan must place a parameter at most once, got {self.buckets}")
        object.__setattr__(self, "bucket_of", tuple(bucket_of))
        object.__setattr__(self, "members", tuple(members))
        object.__setattr__(self, "sizes", tuple(len(bucket.param_indices) for bucket in self.buckets))


class Planner:
    """Makes and remembers plans.

    ``order`` is the launch order of all parameters: reversed definition order until ``learn`` replaces it with what
    the first backward showed. ``held`` are parameters known to fire more than once, or at a time the engine cannot
    foretell; until an order was learnt every parameter is held.

    Args:
        specs: of the parameters.
        limits: bucket sizes in bytes (see ``buckets.assign``).
        limits_of_much: those of plans of ``MUCH_BYTES`` or more; the same if none are given.
    """

    def __init__(self, specs: Sequence[ParamSpec], limits: Sequence[int], limits_of_much: Sequence[int] = ()) -> None:
        self._num_params = len(specs)
        self.limits = tuple(limits), tuple(limits_of_much or limits)
        self._items: list[Item] = []
        self._is_sparse: list[bool] = []
        self.order: list[int] = list(reversed(range(len(specs))))
        self.held: set[int] = set()
        self.has_learnt = False
        self._plans: OrderedDict[bytes, BucketPlan] = OrderedDict()
        self.set_specs(specs)

    def set_specs(self, specs: Sequence[ParamSpec]) -> None:
        """Take over changed sizes, dtypes or devices; plans made for the old ones are forgotten."""
        keys: dict[BucketKey, int] = {}  # small integers hash faster than (dtype, device)
        self._items = [
            (i, s.nbytes, keys.setdefault(s.key, len(keys)), s.is_sparse or travels_alone(s))
            for i, s in enumerate(specs)
        ]
        self._is_sparse = [s.is_sparse for s in specs]
        self._plans.clear()

    def plan(self, agreed: bytes) -> BucketPlan:
        """The plan for the set of parameters whose byte in ``agreed`` is not 0. Cost: linear, or a look-up."""
        plan = self._plans.get(agreed)
        if plan is None:
            plan = self._plans[agreed] = self._make(agreed)
            if len(self._plans) > MAX_CACHED_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(agreed)
        return plan

    def _make(self, agreed: bytes) -> BucketPlan:
        items, held = self._items, self.held
        present = [items[i] for i in self.order if agreed[i]]
        early: list[Item] = []
        late: list[Item] = []
        if not self.has_learnt:
            late = present
        elif held:
            for item in present:
                (late if item[0] in held else early).append(item)
        else:
            early = present
        sparse = self._is_sparse
        usual, of_much = self.limits
        limits = usual if sum([nbytes for _, nbytes, _, _ in present]) < MUCH_BYTES else of_much
        buckets = [BucketSpec(tuple(one), sparse[one[0]], False) for one, _ in assign(early, limits)]
        if late:
            buckets += [BucketSpec(tuple(one), sparse[one[0]], True) for one, _ in assign(late, limits)]
        return BucketPlan(self._num_params, tuple(buckets), self.has_learnt)

    def learn(self, positions: Sequence[int], repeated: Iterable[int]) -> None:
        """Launch in the order that a backward showed.

        Args:
            positions: for each parameter the latest position at which any rank saw it become ready, negative where
                none did. A parameter that no rank saw goes behind its neighbour in reversed definition order.
            repeated: parameters that fired more than once.
        """
        seen = sorted((i for i in range(self._num_params) if positions[i] >= 0), key=lambda i: (positions[i], -i))
        followers: dict[int | None, list[int]] = {}
        neighbour: int | None = None
        for i in reversed(range(self._num_params)):
            if positions[i] >= 0:
                neighbour = i
            else:
                followers.setdefault(neighbour, []).append(i)
        self.order = followers.get(None, [])
        for i in seen:
            self.order.append(i)
            self.order += followers.get(i, ())
        self.held.update(repeated)
        self.has_learnt = True
        self._plans.clear()

    def hold(self, param_indices: Iterable[int]) -> None:
        """From now on launch these only when the backward is over."""
        fresh = set(param_indices) - self.held
        if fresh:
            self.held |= fresh
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)
