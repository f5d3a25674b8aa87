"""Running replicas at the same time, each in a thread that sees what its caller's thread sees.

[Note: turns] Replicas on one device take turns, in order. They share its random generator: at the same time they would
draw from it in an order that nobody knows, and an activation checkpoint, which puts the generator back to where it was
to draw the same numbers again, would draw others. Replicas on different devices run at the same time. What they draw on
the CPU, whose generator all threads share, comes in an order that no seed repeats: draw on the replica's own device.

Transforms of ``torch.func`` and modes that intercept calls belong to one thread and cannot be entered in a second one.
Under those all replicas take turns in the caller's.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import _torch_private as private


class CallerState:
    """What a thread of PyTorch's has to itself, as it is on the thread that makes this.

    Gradient and inference mode, autocast, hooks on saved tensors, the default device, and current streams. Hooks of a
    checkpoint around the replicas are left out: they count saved tensors, and here the order is not theirs.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._hooks = private.saved_tensor_hooks()
        default = torch.get_default_device()
        self._default_device = None if default.type == "cpu" else default
        self._first = devices[0]
        self._streams = {d: torch.accelerator.current_stream(d) for d in devices if d.type in kinds - {"cpu"}}

    @contextlib.contextmanager
    def caller_thread(self, device: torch.device) -> Iterator[None]:
        """For a replica on ``device`` in the caller's thread: it is the current one if its kind has such, and the
        default if replica 0's is.
        """
        with contextlib.ExitStack() as stack:
            if device in self._streams:
                stack.enter_context(torch.accelerator.device_index(device.index))
                stack.enter_context(self._streams[device])
            if self._default_device is not None:
                is_own = self._default_device == self._first
                stack.enter_context(device if is_own else self._default_device)
            yield

    @contextlib.contextmanager
    def worker_thread(self, device: torch.device) -> Iterator[None]:
        """The same in another thread, which sees what the caller's sees."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.caller_thread(device))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))  # after inference mode, which sets it too
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches_casts))
            if self._hooks is not None and getattr(self._hooks[0], "__module__", None) != "torch.utils.checkpoint":
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
            yield


class _Task:
    """One replica's run. ``before`` is the one whose turn on the same device comes first."""

    def __init__(self, call: Callable[[], Any], device: torch.device, before: _Task | None) -> None:
        self._call = call
        self.device = device
        self._before = before
        self.is_over = threading.Event()
        self.has_failed = False
        self.output: Any = None
        self.error: BaseException | None = None

    def run(self, place: Callable[[torch.device], contextlib.AbstractContextManager[None]]) -> None:
        """Wait for one's turn and run; not if the one before failed."""
        try:
            if self._before is not None:
                self._before.is_over.wait()
                self.has_failed = self._before.has_failed
            if not self.has_failed:
                with place(self.device):
                    self.output = self._call()
        except BaseException as error:
            self.error, self.has_failed = error, True
        finally:
            self.is_over.set()

    def give_up(self) -> None:
        """It will not run, nor will those that wait for it."""
        self.has_failed = True
        self.is_over.set()


def run_parallel(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """What ``calls`` return. The first is run by the calling thread, the others by one each; see [Note: turns].

    Raises:
        What the first call that raised has raised, with its traceback and a note that names replica and device. By then
        no thread is left.
    """
    state = CallerState(devices)
    tasks: list[_Task] = []
    last: dict[torch.device, _Task] = {}
    for call, device in zip(calls, devices, strict=True):
        last[device] = _Task(call, device, last.get(device))
        tasks.append(last[device])
    if private.is_bound_to_thread():
        for task in tasks:
            task.run(state.caller_thread)
    else:
        _run_in_threads(tasks, state)
    error = _first_error(tasks)
    try:
        if error is not None:
            raise error
    finally:
        del error  # else a cycle through the traceback keeps the replicas alive
    return [task.output for task in tasks]


def _run_in_threads(tasks: Sequence[_Task], state: CallerState) -> None:
    started: list[tuple[_Task, threading.Thread]] = []
    try:
        for replica, task in enumerate(tasks[1:], 1):
            arguments = (task.run, state.worker_thread)
            name = f"knownddp replica {replica}"
            thread = threading.Thread(target=contextvars.copy_context().run, args=arguments, name=name, daemon=True)
            thread.start()
            started.append((task, thread))
        tasks[0].run(state.caller_thread)
    except BaseException:  # a thread could not be started, or an interrupt came between two lines
        tasks[0].give_up()
        raise
    finally:
        try:
            _join(started)
        except BaseException:  # an interrupt: replicas come to their end all the same; a second one goes through
            _join(started)
            raise


def _join(started: Sequence[tuple[_Task, threading.Thread]]) -> None:
    for task, thread in started:
        # Not ``join``: interrupted while it waits, it takes the thread for ended from then on (CPython 3.11).
        task.is_over.wait()
        thread.join()


def _first_error(tasks: Sequence[_Task]) -> BaseException | None:
    """The error of the lowest replica that has one, with a note. Tasks forget theirs: tracebacks lead back to them."""
    found: BaseException | None = None
    try:
        for replica, task in enumerate(tasks):
            error, task.error = task.error, None
            if error is not None and found is None:
                found = error
                _annotate(error, f"raised in replica {replica} of {len(tasks)}, on {task.device}")
            del error
        return found
    finally:
        del found


def _annotate(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}",)


def separate_seeds(devices: Sequence[torch.device]) -> None:
    """Give random generators of different accelerators different seeds where they have one and the same.

    ``torch.manual_seed`` seeds all alike, and then all replicas would drop the same units. The new seed follows from
    the old one and the replica's number.
    """
    firsts: dict[str, torch.Generator] = {}
    for replica, device in enumerate(dict.fromkeys(devices)):
        generator = private.default_generator(device)
        if generator is None:
            continue
        first = firsts.setdefault(device.type, generator)
        if generator is not first and generator.initial_seed() == first.initial_seed():
            generator.manual_seed(seed_of(first.initial_seed(), replica))


def seed_of(seed: int, replica: int) -> int:
    """A seed for a replica, below 2**63."""
    digest = hashlib.blake2b(f"{seed} {replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
