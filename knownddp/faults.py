"""Why a window ended in an error: what each rank tells the others, and the exception all of them raise."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import (
    BrokenTrustError,
    CompiledBackwardError,
    GradientTakenError,
    GraphChangedError,
    HiddenOutputError,
    InternalError,
    KnownDDPError,
    PeerError,
    PeerFailedError,
    RanksDifferError,
    UnfinishedBackwardError,
    UsageError,
    shorten,
)
from .outcomes import Fault


@dataclass(frozen=True, slots=True)
class Testimony:
    """What one rank knows of its own window, exchanged once the ranks know that it failed."""

    failed: bool  # its backward raised
    nested: bool  # its backward began where the end cannot be seen
    begun_at_output: bool  # its backward began at an output of the wrapper
    declared: tuple[str, ...]
    layout: tuple[str, ...]  # dtype and shape of each parameter
    hook: str  # its communication hook
    limits: tuple[tuple[int, ...], ...]  # of its buckets, in bytes
    # Parameters that this graph reached and the first did not, the other way round, and another number of times.
    changes: tuple[tuple[str, ...], ...]


def _ranks(which: Sequence[int]) -> str:
    return ("rank " if len(which) == 1 else "ranks ") + ", ".join(map(str, which))


def distributed_autograd_error(where: str) -> UsageError:
    """The exception for a forward or a backward of distributed autograd."""
    return UsageError(
        f"{where} this wrapper was called inside torch.distributed.autograd.context(), and KnownDDP leaves distributed "
        "autograd out.\n"
        "Why: it puts gradients in its context instead of .grad, where they would stay those of one rank.\n"
        "Fix: call the model and backward() outside of the context, or wrap the module in DistributedDataParallel."
    )


def warned(error: UsageError) -> UsageError:
    """``error``, said in a warning too: of an exception, distributed autograd keeps no more than that there was one."""
    warnings.warn(str(error), stacklevel=3)
    return error


def error_for(
    fault: Fault, where: str, told: Sequence[Testimony], names: Sequence[str], about: Sequence[int]
) -> KnownDDPError:
    """The exception for ``fault``.

    Args:
        where: this rank, as ``errors.at_rank`` says it.
        told: every rank's testimony, by rank; under "trust" this rank's alone.
        names: qualified names of all parameters.
        about: the parameters that the fault is about.
    """
    if fault is Fault.GRAPH:
        return _graph_changed(where, told, about)
    listed = shorten([names[i] for i in about])
    if fault is Fault.FAILED:
        failed = [r for r, one in enumerate(told) if one.failed]
        return PeerFailedError(
            f"{where} the backward on {_ranks(failed)} raised, so no gradient of this backward was averaged; .grad is "
            "as it was before.\nFix: see the error there; the next step of all ranks goes on normally."
        )
    if fault is Fault.NESTED:
        nested = [r for r, one in enumerate(told) if one.nested]
        return HiddenOutputError(
            f"{where} on {_ranks(nested)} the backward of KnownDDP began inside a reentrant activation checkpoint "
            "(or a backward called from an autograd Function), so its end cannot be seen; nothing was averaged.\n"
            "Why: no tensor that the loss was computed from could be found in what the module returned.\n"
            "Fix: return tensors (in containers or dataclasses), or checkpoint with use_reentrant=False."
        )
    if fault is Fault.UNSEEN:
        guessing = [r for r, one in enumerate(told) if not one.begun_at_output]
        return RanksDifferError(
            f"{where} on {_ranks(guessing)} a backward reached parameters without passing an output of KnownDDP, while "
            "a forward was waiting for its backward; on other ranks it passed one. Nothing was averaged.\n"
            "Why: either a loss was taken from something that forward left aside, or a backward through model.module "
            "was meant to stay local.\n"
            "Fix: return what the loss needs from forward; or run forwards that no backward follows under no_grad()."
        )
    if fault is Fault.DECLARATIONS:
        said = "; ".join(f"rank {r} declared {shorten(one.declared) or 'nothing'}" for r, one in enumerate(told))
        return RanksDifferError(
            f'{where} unused_agreement="same", but the ranks declared different unused parameters. In dispute: '
            f"{listed}. {said}.\nNothing was sent or averaged.\n"
            'Fix: draw the layers from a seed and the step alone (knownddp.LayerDropSampler), or use "union".'
        )
    if fault is Fault.MODELS:
        hooks = [one.hook for one in told]
        pairs = [] if len(set(hooks)) == 1 else [f"communication hooks by rank: {hooks}"]
        limits = [one.limits for one in told]
        pairs += [] if len(set(limits)) == 1 else [f"bucket sizes in bytes by rank: {limits}"]
        pairs += [
            f"{names[i]}: {told[0].layout[i]} on rank 0, {one.layout[i]} on rank {r}"
            for r, one in enumerate(told)
            for i in range(len(names))
            if one.layout[i] != told[0].layout[i]
        ]
        return RanksDifferError(
            f"{where} ranks are no longer alike in dtypes, shapes, hooks or bucket sizes: {shorten(pairs, 4)}.\n"
            "Nothing was sent or averaged.\n"
            "Fix: cast or replace parameters, register hooks and give bucket_cap_mb on every rank alike."
        )
    if fault is Fault.TRUST:
        return BrokenTrustError(
            f'{where} unused_agreement="trust", but gradients came that this backward was not to have: {listed}. They '
            "were not averaged and stand in .grad as this rank's own.\n"
            'Fix: declare what is really unused, or use "union", which averages such gradients too.'
        )
    return InternalError(
        f"{where} ranks met at different places of the protocol. Please report it with the training loop that led here."
    )


def _graph_changed(where: str, told: Sequence[Testimony], stock_indices: Sequence[int]) -> GraphChangedError:
    """It keeps both phrases that DistributedDataParallel's users search for."""
    ways = ("reached now and not at first", "reached at first and not now", "reached another number of times")
    said = [
        f"on rank {r} {way}: {shorten(which)}"
        for r, one in enumerate(told)
        for way, which in zip(ways, one.changes, strict=True)
        if which
    ]
    return GraphChangedError(
        f"{where} Your training graph has changed in this iteration, which static_graph=True rules out: "
        f"{'; '.join(said)}. No gradient of this backward was averaged; .grad is as it was before.\n"
        "Fix: leave static_graph out, and declare what a step leaves unused, forward(..., unused_parameters=[...]).\n"
        "In the words of DistributedDataParallel: Expected to have finished reduction in the prior iteration before "
        "starting a new one. This error indicates that your training graph has changed in this iteration, e.g., one "
        "parameter is used in first iteration, but then got unused in the second iteration. this is not compatible "
        "with static_graph set to True.\n"
        f"Parameter indices which did not receive grad for {where[1:-1]}: {' '.join(map(str, stock_indices))}"
    )


def unfinished_error(
    where: str, rank: int, names: Sequence[str], missing: Sequence[int], stock_indices: Sequence[int]
) -> UnfinishedBackwardError:
    """Promises were not kept; the text keeps the phrases that DistributedDataParallel's users search for.

    ``stock_indices`` are the numbers by which DistributedDataParallel would call the ``missing`` parameters.
    """
    return UnfinishedBackwardError(
        f"{where} Expected to have finished reduction in the prior iteration before starting a new "
        f"one: {len(missing)} of {len(names)} parameters were expected to receive a gradient and received none on any "
        f"rank ({shorten([names[i] for i in missing])}). All other gradients of that backward were averaged.\n"
        "Why: a branch skipped these parameters, or an output never reached the loss.\n"
        "Fix: declare them, forward(..., unused_parameters=[...]); or enable detection by passing the keyword argument "
        "`find_unused_parameters=True` to KnownDDP; or make sure that all `forward` function outputs participate in "
        "calculating loss.\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}\n"
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, stock_indices))}\n"
        "(Names are always shown: you need not set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
        "DETAIL.)"
    )


def broken_error(where: str) -> PeerError:
    """A window cannot begin any more."""
    return PeerError(
        f"{where} a collective of this wrapper failed or timed out, so ranks may be out of step.\n"
        "Fix: restart, or make a new process group and wrap the module again."
    )


def compiled_error(where: str) -> CompiledBackwardError:
    """Compiled autograd runs the backward."""
    return CompiledBackwardError(
        f"{where} this backward runs under compiled autograd, which defers and reorders the hooks that KnownDDP "
        "averages gradients in; nothing was sent.\n"
        "Fix: set torch._dynamo.config.compiled_autograd=False, or call backward inside `with "
        "torch._dynamo.compiled_autograd._disable():`. torch.compile itself, forward and backward, works."
    )


def second_backward_error(where: str) -> UsageError:
    """In a join context a window must be the one that its forward announced."""
    return UsageError(
        f"{where} a second backward began after one forward inside join().\n"
        "Why: ranks without inputs take part in one backward for each forward; they would miss this one.\n"
        "Fix: add the losses and call backward once, or run all but the last forward and backward in no_sync()."
    )


def dispute_message(where: str, names: Sequence[str]) -> str:
    """The text of the warning that differing declarations cost bytes."""
    return (
        f"{where} ranks declared different unused parameters; those that any rank uses are reduced "
        f"on all ({shorten(names)}). This is right but costs their bytes. To save them draw the same layers on every "
        "rank (knownddp.LayerDropSampler); stats().bytes_disputed counts them."
    )


def late_message(where: str, names: Sequence[str]) -> str:
    """The text of the warning that parameters were declared unused and used all the same."""
    return (
        f"{where} gradients came, here or on other ranks, for parameters that this rank declared unused and no rank "
        f"expected: {shorten(names)}. They are averaged, but after all others, in a round of their own, which "
        "stats().late_rounds counts. To save it declare only what the whole backward leaves out."
    )


def gradient_taken_error(where: str, name: str) -> GradientTakenError:
    """The exception for a ``.grad`` that is gone, or of another shape, before it could be averaged."""
    return GradientTakenError(
        f"{where} a hook took the gradient of {name} out of .grad before it could be averaged over ranks, put another "
        "there, or gave it another shape.\nFix: step optimizers and clear gradients after backward(); let a hook "
        "change the gradient of its own parameter only, and not its shape."
    )
