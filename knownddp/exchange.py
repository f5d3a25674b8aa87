"""The gradients of one window: taken out of ``.grad``, packed, summed over ranks, and handed back as means."""

from __future__ import annotations

import operator
from collections.abc import Collection, Generator, Mapping
from itertools import compress, repeat

import torch
from torch import Tensor

from . import _torch_private as private
from ._torch_private import storage_view
from .errors import GradientTakenError, at_rank
from .faults import gradient_taken_error
from .flat import grads_of, sparse_share, with_strides_of
from .flights import Flight, Resources, Terms, wait_for_streams
from .ownership import may_be_overwritten, put_means, sharing
from .params import NOTHING
from .plan import BucketPlan, BucketSpec, travels_alone
from .pool import GradientBucket
from .specs import BucketKey
from .works import DONE, Work

_open: list[GradientExchange] = []


class GradientExchange:
    """From the begin of a backward to its end, the keeper of all managed ``.grad``.

    What stands in ``.grad`` when the backward begins is held back, so that autograd makes fresh local gradients: after
    an error it is put back as it was, and a gradient that comes after its bucket left is told apart from one that
    travelled. Once packed, at launch or before, ``.grad`` is given up, so memory is free early.

    Args:
        resources: those of the wrapper.
        terms: how buckets are combined.
        stood_before: for a backward that was noticed one gradient late: what stood in that ``.grad`` before.
    """

    def __init__(self, resources: Resources, terms: Terms, stood_before: Mapping[int, Tensor | None]) -> None:
        params = self._params = resources.params
        self._comm = resources.comm
        self._counters = resources.counters
        self._pool = resources.pool
        self._fired = resources.fired
        self._streams, self._users = resources.streams, resources.users
        self._terms = terms
        self._divisor = 1 if terms.hook is not None else terms.divisor
        self.stood_before = stood_before
        self._begun: dict[int, GradientBucket] = {}  # by first parameter: buckets of which some is packed
        self._flights: list[Flight] = []
        self._late_flights: list[Flight] = []
        self._launched: list[BucketSpec] = []  # lately; see ``_has_travelled``
        self._travelled = bytearray(len(params))
        self._late_means: dict[int, Tensor] = {}
        self._live, self.elsewhere = params.live, NOTHING
        if _open:
            self._leave_out(set().union(*(other.ids() for other in tuple(_open))))
        self.held_back = grads_of(self._live)
        is_clear = all(map(operator.is_, self.held_back, repeat(None)))
        found = [] if is_clear else [i for i, grad in enumerate(self.held_back) if grad is not None]
        self._entangled = sharing(self.held_back) if found else NOTHING
        # The usual case: all there is to average is what autograd is about to make.
        self._is_plain = not found and not self.elsewhere and not stood_before and terms.contributes
        try:
            for i in found:
                self._set(i, None)
        except BaseException:
            self.restore()
            raise
        _open.append(self)

    def _leave_out(self, held: set[int]) -> None:
        """Of wrappers that share parameters the first to begin has them in one backward, as if others had not."""
        self.elsewhere = frozenset(i for i, param in enumerate(self._live) if id(param) in held)
        self._live = [param if i not in self.elsewhere else None for i, param in enumerate(self._live)]

    def ids(self) -> set[int]:
        """Those of the parameters whose gradients this window keeps."""
        return {id(param) for param in self._live if param is not None}

    def release(self) -> None:
        """The window is over: other wrappers may have the parameters."""
        _open.remove(self)

    def unhooked(self) -> list[int]:
        """Parameters that received a gradient without their hook: theirs is a new node since they were cast, say."""
        if 0 not in self._fired:
            return []
        silent = compress(enumerate(self._live), map(operator.not_, self._fired))
        return [i for i, param in silent if param is not None and param.grad is not None]

    @torch.no_grad()
    def launch(self, plan: BucketPlan, position: int) -> None:
        """Pack what this rank has for a bucket of ``plan`` and start to combine it.

        Raises:
            GradientTakenError: a gradient that came is gone, or has another shape.
        """
        bucket = plan.buckets[position]
        with private.profiled("knownddp::pack"):
            filled, flat, packed = self._pack(bucket)
        self._launched.append(bucket)
        self._give_up(bucket, filled)
        numel = flat._values().numel() if bucket.is_sparse else flat.numel()
        self._counters.bytes_reduced += numel * flat.element_size()
        self._counters.buckets_launched += 1
        self._send(plan, position, flat, packed, filled)

    def _pack(self, bucket: BucketSpec) -> tuple[GradientBucket | None, Tensor, list[Tensor]]:
        """What to reduce, 1-D or sparse, and its parts, one a parameter in the strides of its spec; all divided
        already. Before these the flat bucket they lie in, if they lie in one.
        """
        first = bucket.param_indices[0]
        if bucket.is_sparse:
            return self._pack_any(bucket)
        if len(bucket.param_indices) == 1 and self._may_reduce_in_place(first):
            return self._in_place(bucket)
        filled = self._begun.pop(first, None) or self._pool.take(bucket)
        grads = grads_of(filled.params)
        for place in filled.written:
            if grads[place] is not None:  # ``pack_early`` takes all that come
                raise self._taken_error(bucket.param_indices[place])
        if not (self._is_plain and filled.is_whole and filled.fits) or filled.misses(grads):
            return self._pack_any(bucket, filled)
        wait_for_streams(bucket, grads, self._streams)
        try:
            misshapen = filled.copy(grads, self._divisor)
        except RuntimeError:  # one is not strided, or too large
            return self._pack_any(bucket, filled)
        for place in misshapen:
            raise self._taken_error(bucket.param_indices[place])
        return filled, filled.flat, filled.views

    def _pack_any(
        self, bucket: BucketSpec, filled: GradientBucket | None = None
    ) -> tuple[GradientBucket | None, Tensor, list[Tensor]]:
        """As ``_pack``, whatever there is and is not. ``filled``: where to put it, if that was taken already."""
        grads = [param.grad if (param := self._live[i]) is not None else None for i in bucket.param_indices]
        travelled = self._has_travelled()
        for i, grad in zip(bucket.param_indices, grads, strict=True):
            is_missed = grad is None and self._fired[i] and not travelled[i] and i not in self.stood_before
            if is_missed and getattr(self._live[i], "requires_grad", True):  # else it was frozen since the forward
                raise self._taken_error(i)
            for one in (grad, self.held_back[i]):
                if one is not None and tuple(one.shape) != self._params.specs[i].shape:
                    raise self._taken_error(i)
        if self._terms.contributes:
            held_back = [None if travelled[i] else self.held_back[i] for i in bucket.param_indices]
        else:
            held_back = [None] * len(grads)
        wait_for_streams(bucket, grads, self._streams)
        if bucket.is_sparse:
            share = sparse_share(grads[0], held_back[0], self._params.specs[bucket.param_indices[0]], self._divisor)
            return None, share, [share]
        filled = filled or self._pool.take(bucket)
        filled.fill(grads, held_back, self._divisor)
        return filled, filled.flat, filled.views

    def pack_early(self, plan: BucketPlan, param_index: int) -> None:
        """Pack a large gradient that came, if its bucket waits for others: it is at hand now, and its memory is free at
        once. If it comes again before the bucket goes, that is added, rounded by itself.
        """
        position, param = plan.bucket_of[param_index], self._live[param_index]
        if position < len(self._flights) or param is None or torch.is_grad_enabled():  # create_graph
            return
        bucket, grad = plan.buckets[position], param.grad
        is_usual = self._terms.contributes and param_index not in self.stood_before
        may_pack = is_usual and not bucket.is_held and not bucket.is_sparse and len(bucket.param_indices) > 1
        if not may_pack or type(grad) is not Tensor or grad.layout is not torch.strided or grad.device.type != "cpu":
            return
        if grad.shape != param.shape:
            return  # an error, once all is packed
        filled = self._begun.get(bucket.param_indices[0]) or self._pool.take(bucket)
        self._begun[bucket.param_indices[0]] = filled
        if filled.is_whole:
            old = self.held_back[param_index] if not self._travelled[param_index] else None
            filled.write(bucket.param_indices.index(param_index), grad, old, self._divisor)
            self._travelled[param_index] = 1
            param.grad = None

    def _taken_error(self, i: int) -> GradientTakenError:
        return gradient_taken_error(at_rank(self._comm.rank, self._comm.world_size), self._params.names[i])

    def _has_travelled(self) -> bytearray:
        """A byte for each parameter: 1 if what was held back of it is on its way."""
        for bucket in self._launched:
            for i in bucket.param_indices:
                self._travelled[i] = 1
        self._launched.clear()
        return self._travelled

    def _in_place(self, bucket: BucketSpec) -> tuple[None, Tensor, list[Tensor]]:
        """As ``_pack``, in the gradient's own memory."""
        (param_index,) = bucket.param_indices
        param = self._live[param_index]
        assert param is not None and param.grad is not None
        grad = param.grad
        wait_for_streams(bucket, [grad], self._streams)
        return None, storage_view(grad, 0, (grad.numel(),), (1,)).div_(self._divisor), [grad]

    def _give_up(self, bucket: BucketSpec, filled: GradientBucket | None) -> None:
        """The gradients of a bucket are packed: free their memory."""
        if not self.elsewhere and filled is not None and filled.is_whole:
            for param in filled.params:
                param.grad = None
        else:
            for i in bucket.param_indices:
                self._set(i, None)

    def _may_reduce_in_place(self, i: int) -> bool:
        """Whether a gradient is one that travels alone, lies as it must, and is nobody else's."""
        spec, param = self._params.specs[i], self._live[i]
        if not self._is_plain or self._terms.hook is not None or not travels_alone(spec) or not self._params.fits[i]:
            return False
        return param is not None and may_be_overwritten(param, spec, self._users.get(i, 1))

    def _send(
        self, plan: BucketPlan, position: int, flat: Tensor, packed: list[Tensor], filled: GradientBucket | None
    ) -> None:
        """Hand the packed bucket to the hook, else to the collectives."""
        bucket, is_last = plan.buckets[position], position == len(plan.buckets) - 1
        # Should it raise: the bucket counts as launched, since a hook may have called collectives already.
        stream = torch.accelerator.current_stream(flat.device) if flat.device.type != "cpu" else None
        flight = Flight(bucket, DONE, flat, packed, filled if self._terms.hook is None else None, stream)
        room = self._comm.room_to_swap(flat) if is_last and self._terms.hook is None else None  # may run out of memory
        self._flights.append(flight)
        if self._terms.hook is not None:
            specs = [self._params.specs[i] for i in bucket.param_indices]
            params = [param for i in bucket.param_indices if (param := self._params.live[i]) is not None]
            flight.work = self._terms.hook.run(bucket, flat, specs, params, is_last=is_last, is_learnt=plan.is_learnt)
        # A sparse share may be empty here and not on a peer; a dense one is empty everywhere or nowhere.
        elif bucket.is_sparse or flat.numel():
            flight.work = self._comm.all_reduce_sum(flat, room)

    def launch_rest(self, plan: BucketPlan, *, failed: bool) -> BaseException | None:
        """Launch what is left of ``plan``, whether full or not: peers wait for it.

        Returns what went wrong here (out of memory, say), or None. Either way everything is launched, unless the
        connection is lost. ``failed``: this rank failed already.
        """
        error: BaseException | None = None
        if not failed:
            try:
                for position in range(len(self._flights), len(plan.buckets)):
                    self.launch(plan, position)
            except BaseException as raised:  # also an interrupt: peers hear of it before it goes on
                error = raised
        if failed or error is not None:
            self._launch_empty(plan)
        try:
            return error
        finally:
            del error  # in the frame that its traceback holds it would be a cycle, and keep the model alive

    def _launch_empty(self, plan: BucketPlan) -> None:
        """This rank failed: take part in what peers wait for. Nobody will use the result, so all share one tensor.

        Gradients are put back first, which frees the memory of local ones: running out of it may be what failed. A hook
        gets zeros of its own for each bucket: it may keep them.
        """
        self.restore()
        specs = self._params.specs
        rest = list(enumerate(plan.buckets))[len(self._flights) :]
        numel = {
            bucket: sum(specs[i].numel for i in bucket.param_indices) for _, bucket in rest if not bucket.is_sparse
        }
        scratch: dict[BucketKey, Tensor] = {}
        for bucket in sorted(numel, key=lambda one: -numel[one]):
            key = specs[bucket.param_indices[0]].key
            if key not in scratch and self._terms.hook is None:
                scratch[key] = torch.zeros(numel[bucket], dtype=key.dtype, device=key.device)
        for position, bucket in rest:
            first = specs[bucket.param_indices[0]]
            if bucket.is_sparse:
                flat = sparse_share(None, None, first, self._divisor)
            elif self._terms.hook is not None:
                flat = torch.zeros(numel[bucket], dtype=first.key.dtype, device=first.key.device)
            else:
                flat = scratch[first.key][: numel[bucket]]
            try:
                self._send(plan, position, flat, [], None)
            except BaseException:
                if self._terms.hook is None:  # else it raises again what it raised before
                    raise

    def wait(self) -> None:
        """Wait for everything launched so far. Safe once all ranks have launched it."""
        for flight in self._flights:
            flight.wait()

    def wait_for_hook(self) -> Generator[Work, None, BaseException | None]:
        """If a hook combines buckets: wait for its futures, and return what went wrong in them, or None.

        Before the ranks tell each other how their backward went: a hook that failed is a failed backward.
        """
        error: BaseException | None = None
        if self._terms.hook is not None:
            for flight in self._flights:
                try:
                    yield flight
                except Exception as raised:
                    error, flight.work = raised, DONE
        try:
            return error
        finally:
            del error  # as in ``launch_rest``

    @torch.no_grad()
    def hand_back(self, touched: bytes, late: Collection[int]) -> None:
        """Means to what any rank touched, what stood there before to the rest."""
        with private.profiled("knownddp::unpack"):
            self._hand_back(touched, set(late))

    def _hand_back(self, touched: bytes, late: set[int]) -> None:
        flights, self._flights = self._flights, []
        for flight in flights:
            if self._is_plain and not late and flight.filled is not None and flight.filled.fits:
                self._hand_over(flight, touched)
                continue
            due: dict[int, Tensor] = {}
            for i, mean in zip(flight.bucket.param_indices, flight.means(), strict=True):
                if i in late:
                    self._late_means[i] = mean
                elif touched[i]:
                    due[i] = mean
                else:
                    self._set(i, self.held_back[i])
            self._set_means(due)
        if not self._is_plain:
            travelled = self._has_travelled()
            for i, before in enumerate(self.held_back):
                if before is not None and not travelled[i] and i not in late:
                    self._set(i, before)
        for flight in self._late_flights:
            for i, mean in zip(flight.bucket.param_indices, flight.means(), strict=True):
                earlier = self._late_means.get(i)
                self._set_means({i: mean if earlier is None else earlier + mean})
        self._pool.give(flight.filled for flight in flights if flight.filled is not None)

    def _hand_over(self, flight: Flight, touched: bytes) -> None:
        """The parts of a bucket become ``.grad`` as they are."""
        assert flight.filled is not None
        params, means = flight.filled.params, flight.means()
        if not flight.filled.is_laid_out_like_params():
            means = list(map(with_strides_of, params, means))
        are_touched = list(map(touched.__getitem__, flight.bucket.param_indices))
        pairs = zip(params, means, strict=True)
        for param, mean in pairs if all(are_touched) else compress(pairs, are_touched):
            param.grad = mean

    def late_round(self, plan: BucketPlan) -> Generator[Work, None, BaseException | None]:
        """Average what came late, on all ranks alike; see [Note: late] in protocol.py. Yields handles to wait for.

        Returns what went wrong here, or None. ``hand_back`` follows.
        """
        self._counters.late_rounds += 1
        on_time, self._flights = self._flights, []
        error = self.launch_rest(plan, failed=False)
        error = (yield from self.wait_for_hook()) or error
        yield from self._flights
        self._late_flights, self._flights = self._flights, on_time
        try:
            return error
        finally:
            del error  # as in ``launch_rest``

    @torch.no_grad()
    def keep_late_ones_local(self, late: Collection[int]) -> None:
        """Under "trust" nobody else knows of them: they stay this rank's own, added to what is there."""
        for i in late:
            param = self._live[i]
            before = self._late_means.get(i, self.held_back[i])
            if param is not None and before is not None:
                param.grad = before if param.grad is None else before + param.grad

    def restore(self) -> None:
        """Everything as it was when the backward began."""
        self._begun.clear()
        for i, before in enumerate(self.held_back):
            self._set(i, self.stood_before.get(i, before))

    def _set(self, i: int, grad: Tensor | None) -> None:
        param = self._live[i]
        if param is not None:
            param.grad = grad

    def _set_means(self, means: Mapping[int, Tensor]) -> None:
        """Where a gradient was also that of another parameter, the mean does not go into it."""
        before = [self.held_back[i] if i not in self._entangled else None for i in means]
        put_means([self._live[i] for i in means], before, list(means.values()))


def is_held_elsewhere(param: Tensor, here: GradientExchange | None) -> bool:
    """Whether an open window of another wrapper has ``param``."""
    alone = len(_open) == (here is not None)  # the usual case, at no cost
    return not alone and any(other is not here and id(param) in other.ids() for other in tuple(_open))
