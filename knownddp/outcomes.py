"""What the two messages of a window tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from .plan import BucketPlan


class Fault(Enum):
    """Why a window ends in an error, on every rank alike."""

    CROSSED = auto()  # OPEN met CLOSE, or windows of different numbers met: the library's fault
    MODELS = auto()  # dtypes or shapes of the parameters, hooks or bucket sizes differ between ranks
    DECLARATIONS = auto()  # "same" was asked for and declarations differ
    NESTED = auto()  # a backward began where its end cannot be seen
    UNSEEN = auto()  # some ranks only guess that theirs is a backward of this wrapper, others know
    FAILED = auto()  # a backward raised on some rank
    GRAPH = auto()  # the graph was promised to be static and changed on some rank
    TRUST = auto()  # under "trust": a gradient that was not expected, on this rank alone


NONE: Final = range(0)  # no bucket may go


@dataclass(frozen=True, slots=True)
class Opening:
    """What OPEN told.

    ``launch`` are the buckets that may go now. ``disputed`` are parameters that one rank declared unused and another
    did not.
    """

    fault: Fault | None
    launch: range = NONE
    disputed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Closing:
    """What CLOSE told.

    ``touched`` has a byte for each parameter: 1 if any rank has a gradient to average. ``late`` are due in one more
    round, planned by ``late_plan``. ``order_due`` says that the ready order is to be agreed now.
    """

    fault: Fault | None
    touched: bytes = b""
    late: tuple[int, ...] = ()
    late_plan: BucketPlan | None = None
    order_due: bool = False
