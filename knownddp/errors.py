"""Every exception the library raises, sorted by whose fault it is.

``UsageError``: the caller's, on this rank. ``PeerError``: what another rank did, or how it differs.
``InternalError``: the library's own. Each message says where, what, why and the fix. The types also inherit
the built-in exception that DistributedDataParallel raises in the same place, so that ``except`` clauses
written for it go on working.
"""

from collections.abc import Iterable


class KnownDDPError(Exception):
    """Base of everything knownddp raises on purpose."""


class UsageError(KnownDDPError):
    """The caller asked for something that cannot be done; nothing was sent."""


class ArgumentError(UsageError, ValueError):
    """A constructor argument, or a combination of them, makes no sense."""


class MeshError(ArgumentError, RuntimeError):
    """``device_mesh`` has more than one dimension, or was given beside ``process_group``."""


class ModelError(UsageError, RuntimeError):
    """The wrapped module cannot be trained by KnownDDP as it is."""


class DeviceError(UsageError, ValueError):
    """The parameters lie on devices that one wrapper cannot serve."""


class DeclarationError(UsageError, TypeError):
    """``unused_parameters`` is not an iterable of parameters, modules or names, or came at a wrong time."""


class UnknownParameterError(UsageError, ValueError):
    """``unused_parameters`` names something that is not part of the wrapped module."""


class UnfinishedBackwardError(UsageError, RuntimeError):
    """Parameters that were expected to receive a gradient received none on any rank."""


class HiddenOutputError(UsageError, RuntimeError):
    """A backward began inside a reentrant checkpoint, where its end cannot be seen."""


class CompiledBackwardError(UsageError, RuntimeError):
    """A backward ran under compiled autograd, whose hooks tell too little."""


class GradientTakenError(UsageError, RuntimeError):
    """A hook of the user's took a gradient out of ``.grad``, or changed its shape, before it could be averaged."""


class BrokenTrustError(UsageError, RuntimeError):
    """Under ``unused_agreement="trust"`` a gradient came that this rank had declared unused, or one came twice."""


class CommHookError(UsageError, RuntimeError):
    """A communication hook returned something else than a future of one tensor, or was registered twice."""


class CommHookTypeError(CommHookError, TypeError):
    """What was registered as a communication hook cannot be called."""


class GraphChangedError(UsageError, RuntimeError):
    """Under ``static_graph=True`` a backward reached other parameters than the first one, on some rank."""


class ReplicaError(UsageError, RuntimeError):
    """Inputs cannot be split over several devices, or the outputs of the replicas there not be joined."""


class PeerError(KnownDDPError, RuntimeError):
    """Something that happened on another rank, reported on this one."""


class RanksDifferError(PeerError, ValueError):
    """The ranks were given different models, options or declarations."""


class PeerFailedError(PeerError):
    """A backward raised on another rank; no gradient of this backward was averaged on any rank."""


class InternalError(KnownDDPError, RuntimeError):
    """The library broke one of its own rules. Please report it."""


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """The first ``limit`` names, and how many more there are."""
    listed = list(names)
    tail = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + tail


def at_rank(rank: int, world_size: int) -> str:
    """The prefix of every message."""
    return f"[rank {rank} of {world_size}]"
