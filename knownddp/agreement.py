"""What the ranks agree on when a wrapper is made: that they hold one model, wrapped alike, and in which layout.

Each rank reports what it found, errors of its own included, in one exchange; so whatever is wrong on any rank raises
on every rank, and no rank is left waiting in a collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .comm import Collectives
from .errors import PeerError, RanksDifferError, at_rank, shorten
from .flat import canonical_strides, is_dense
from .params import ManagedParams, restride
from .rnns import kept_flat

MAX_DIFFERENCES = 4


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One parameter or buffer as a rank holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device_type: str
    bucket_kind: int = 0  # which of the rank's (dtype, device) pairs, in order of appearance; device numbers may differ
    is_sparse: bool = False

    def __str__(self) -> str:
        sparse = ", sparse gradient" if self.is_sparse else ""
        return f"{self.name} {list(self.shape)} {self.dtype} on {self.device_type} (place {self.bucket_kind}){sparse}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """All that one rank says of its model. ``error`` is what already went wrong on that rank."""

    error: str | None
    options: Mapping[str, object]
    params: tuple[TensorReport, ...]
    buffers: tuple[TensorReport, ...]
    strides: tuple[tuple[int, ...], ...]


def report_on(params: ManagedParams, buffers: Mapping[str, Tensor], options: Mapping[str, object]) -> ModelReport:
    """This rank's report."""
    live = [p for p in params.live if p is not None]
    kinds: dict[tuple[object, object], int] = {}
    described = tuple(
        TensorReport(
            name,
            tuple(p.shape),
            str(p.dtype),
            p.device.type,
            kinds.setdefault((p.dtype, p.device), len(kinds)),
            sparse,
        )
        for name, p, sparse in zip(params.names, live, params.sparse, strict=True)
    )
    held = tuple(TensorReport(n, tuple(b.shape), str(b.dtype), b.device.type) for n, b in buffers.items())
    strides = tuple(canonical_strides(p.shape, p.stride()) for p in live)
    return ModelReport(None, options, described, held, strides)


def tell(comm: Collectives, error: Exception) -> None:
    """Let the other ranks, which are in ``agree``, hear that this one has to raise ``error``."""
    comm.gather_objects(ModelReport(f"{type(error).__name__}: {error}", {}, (), (), ()))


def agree(comm: Collectives, mine: ModelReport) -> ModelReport:
    """Exchange reports and return rank 0's.

    Raises:
        PeerError: another rank could not wrap its module.
        RanksDifferError: options or models differ; the message names the first differences.
    """
    reports: list[ModelReport] = comm.gather_objects(mine)
    where = at_rank(comm.rank, comm.world_size)
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise PeerError(f"{where} KnownDDP could not be made on rank {rank}, so it is made on none: {report.error}")
    first = reports[0]
    for rank, report in enumerate(reports):
        for name, value in report.options.items():
            if first.options[name] != value:
                raise RanksDifferError(
                    f"{where} {name} is {first.options[name]!r} on rank 0 and {value!r} on rank {rank}.\n"
                    "Fix: construct KnownDDP with the same arguments on every rank."
                )
        for what, theirs, ours in (
            ("parameters", first.params, report.params),
            ("buffers", first.buffers, report.buffers),
        ):
            differences = _differences(theirs, ours)
            if differences:
                raise RanksDifferError(
                    f"{where} the {what} of the module differ between rank 0 ({len(theirs)}) and rank {rank} "
                    f"({len(ours)}): {shorten(differences, MAX_DIFFERENCES)}.\n"
                    "Why: gradients and buffers are combined by position; unlike ones would be summed silently.\n"
                    "Fix: build the same module on every rank."
                )
    return first


def _differences(theirs: Sequence[TensorReport], ours: Sequence[TensorReport]) -> list[str]:
    first, other = ({one.name: one for one in some} for some in (theirs, ours))
    found = [f"[{a}] against [{other[n]}]" for n, a in first.items() if n in other and other[n] != a]
    found += [f"[{a}] only on rank 0" for n, a in first.items() if n not in other]
    found += [f"[{b}] missing on rank 0" for n, b in other.items() if n not in first]
    if not found and tuple(first) != tuple(other):
        found = ["the same names in another order"]
    return found


@dataclass(frozen=True, slots=True)
class Moved:
    """Names of parameters that ``fix_strides`` laid out anew, by the reason."""

    unlike: tuple[str, ...] = ()  # other strides than rank 0's
    not_dense: tuple[str, ...] = ()  # elements that share memory, or gaps between them


def fix_strides(module: nn.Module, params: ManagedParams, agreed: Sequence[tuple[int, ...]]) -> Moved:
    """Lay out parameters that have other strides than rank 0's as rank 0 has them, which is row-major if they are not
    dense there. One that is not dense here is laid out anew in any case: nobody could write to it if it was expanded.

    Values, identity and ``.grad`` stay, and an RNN that was one chunk of memory is one again.
    """
    unlike, not_dense = [], []
    with kept_flat(module):
        for name, param, strides in zip(params.names, params.live, agreed, strict=True):
            if param is None:
                continue
            if not is_dense(param.shape, param.stride()):
                not_dense.append(name)
            elif canonical_strides(param.shape, param.stride()) != strides:
                unlike.append(name)
            else:
                continue
            restride(param, strides)
    return Moved(tuple(unlike), tuple(not_dense))


def warn_of_moved(moved: Moved, where: str) -> None:
    """One warning a reason, that names them."""
    if moved.unlike:
        warnings.warn(
            f"{where} {len(moved.unlike)} parameters had other strides than on rank 0 and were laid out like there, "
            f"values kept: {shorten(moved.unlike)}.",
            stacklevel=3,
        )
    if moved.not_dense:
        warnings.warn(
            f"{where} {len(moved.not_dense)} parameters were not dense (expanded, or a slice of a larger tensor) and "
            f"were laid out anew, values kept; they share memory with nothing now: {shorten(moved.not_dense)}.",
            stacklevel=3,
        )
