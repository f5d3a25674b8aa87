"""knownddp: DistributedDataParallel that knows in advance which layers a step skips."""

from .buckets import compute_bucket_assignment_by_size
from .compact import CompactReport, compact_parameters
from .ddp import KnownDDP
from .errors import (
    ArgumentError,
    BrokenTrustError,
    CommHookError,
    CommHookTypeError,
    CompiledBackwardError,
    DeclarationError,
    DeviceError,
    GradientTakenError,
    GraphChangedError,
    HiddenOutputError,
    InternalError,
    KnownDDPError,
    MeshError,
    ModelError,
    PeerError,
    PeerFailedError,
    RanksDifferError,
    ReplicaError,
    UnfinishedBackwardError,
    UnknownParameterError,
    UsageError,
)
from .sampling import LayerDropSampler
from .stats import ReducerStatistics

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BrokenTrustError",
    "CommHookError",
    "CommHookTypeError",
    "CompactReport",
    "CompiledBackwardError",
    "DeclarationError",
    "DeviceError",
    "GradientTakenError",
    "GraphChangedError",
    "HiddenOutputError",
    "InternalError",
    "KnownDDP",
    "KnownDDPError",
    "LayerDropSampler",
    "MeshError",
    "ModelError",
    "PeerError",
    "PeerFailedError",
    "RanksDifferError",
    "ReducerStatistics",
    "ReplicaError",
    "UnfinishedBackwardError",
    "UnknownParameterError",
    "UsageError",
    "compact_parameters",
    "compute_bucket_assignment_by_size",
]
