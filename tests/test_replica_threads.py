"""Replicas run in threads: what these see of their caller, random numbers, exceptions, and what is left behind."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import itertools
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import Skippable, assert_grads, inputs, make, mean_grads
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp import _torch_private as private
from knownddp.parallel import CallerState, run_parallel, seed_of, separate_seeds

CPU = torch.device("cpu")
THREE = ["cpu"] * 3


class Asking(nn.Module):
    """Answers a question on every replica."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.ask = ask
        self.answers: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.answers.append(self.ask())
        return x * self.weight


def answers_of(ask: Callable[[], Any], around: AbstractContextManager[Any] | None = None) -> list[Any]:
    model, x = KnownDDP(Asking(ask), device_ids=THREE), torch.ones(3, 3)
    with around or nullcontext():
        model(x)
    return model.module.answers


# -- what threads see


def test_each_replica_has_a_thread_and_the_first_the_callers():
    idents = answers_of(threading.get_ident)
    assert idents[0] == threading.get_ident() and len(answers_of(threading.current_thread)) == 3
    names = answers_of(lambda: threading.current_thread().name)
    assert names[1:] == ["knownddp replica 1", "knownddp replica 2"]


STATES = {
    "no_grad": (torch.no_grad(), torch.is_grad_enabled, False),
    "grad": (torch.enable_grad(), torch.is_grad_enabled, True),
    "inference": (torch.inference_mode(), torch.is_inference_mode_enabled, True),
    "autocast": (torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu"), True),
    "its dtype": (torch.autocast("cpu", torch.float16), lambda: torch.get_autocast_dtype("cpu"), torch.float16),
    "its cache": (torch.autocast("cpu", torch.float16, cache_enabled=False), torch.is_autocast_cache_enabled, False),
    "no autocast": (nullcontext(), lambda: torch.is_autocast_enabled("cpu"), False),
    "default device": (torch.device("meta"), lambda: torch.empty(1).device.type, "meta"),
    "anomaly": (torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled, True),
}


@pytest.mark.parametrize(("around", "ask", "wanted"), STATES.values(), ids=STATES)
def test_the_callers_state_holds_in_every_replica(around, ask, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly detection warns that it is slow
        assert answers_of(ask, around) == [wanted] * 3


def test_gradients_are_off_in_inference_mode():
    assert answers_of(torch.is_grad_enabled, torch.inference_mode()) == [False] * 3


@contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def test_settings_of_the_process_hold_in_every_replica():
    double = _set(torch.set_default_dtype, torch.float64, torch.get_default_dtype())
    assert answers_of(lambda: torch.tensor(1.0).dtype, double) == [torch.float64] * 3
    deterministic = _set(torch.use_deterministic_algorithms, True, False)
    assert answers_of(torch.are_deterministic_algorithms_enabled, deterministic) == [True] * 3


def test_context_variables_hold_in_every_replica():
    variable = contextvars.ContextVar("variable", default=0)
    assert answers_of(variable.get, _set(variable.set, 7, 0)) == [7] * 3


def test_hooks_on_saved_tensors_hold_in_every_replica():
    """Each replica's product saves something of its three rows of one."""
    packed: list[tuple[str, torch.Size]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((threading.current_thread().name, tensor.shape))
        return tensor

    plain, model = make(device_ids=THREE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs(0, 6, 3)).square().mean()
    loss.backward()
    assert {name for name, _ in packed} >= {"knownddp replica 1", "knownddp replica 2"}
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(inputs(0, 6, 3)).square().mean()))


def test_hooks_on_saved_tensors_may_be_methods_of_tensors():
    """Those do not say which module they are from."""
    plain, model = make(device_ids=THREE)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.clone):
        loss = model(inputs(0, 6, 3)).square().mean()
    loss.backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(inputs(0, 6, 3)).square().mean()))


def test_autocast_computes_in_its_dtype_in_every_replica():
    plain, model = make(lambda: nn.Linear(3, 2), device_ids=THREE)
    x = inputs(0, 6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    ours.sum().backward()
    assert model.module.weight.grad.dtype == torch.float32


def test_no_gradients_follow_under_no_grad():
    _, model = make(device_ids=THREE)
    with torch.no_grad():
        assert not model(inputs(0, 6, 3)).requires_grad
    with torch.inference_mode():
        assert model(inputs(0, 6, 3)).is_inference()


# -- random numbers


def _masks(seed: int, model: KnownDDP) -> list[list[float]]:
    torch.manual_seed(seed)
    return model(torch.ones(3, 64)).tolist()


def test_replicas_drop_different_units_and_a_seed_repeats_them():
    model = KnownDDP(Dropping(), device_ids=THREE)
    first, again, other = _masks(1, model), _masks(1, model), _masks(2, model)
    assert first == again and first != other
    assert first[0] != first[1] != first[2] != first[0]
    for mask in first:
        assert set(mask) == {0, 2}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.unit, 0.5)


def test_replicas_on_one_device_draw_as_one_loop_over_them_would():
    model, x = KnownDDP(Dropping(), device_ids=THREE), torch.ones(6, 5)
    torch.manual_seed(3)
    joined = model(x)
    torch.manual_seed(3)
    assert torch.equal(joined, torch.cat([nn.functional.dropout(part, 0.5) for part in x.chunk(3)]))


@pytest.mark.parametrize("first", [0, 1])
def test_what_replicas_on_different_devices_draw_on_the_cpu_depends_on_who_comes_first(first):
    """The generator is one for all threads. Here one replica waits for the other; else chance decides."""
    torch.manual_seed(3)
    drawn_in_turn = torch.rand(2, 3).tolist()
    has_drawn = [threading.Event(), threading.Event()]

    def draw(replica: int) -> list[float]:
        assert replica == first or has_drawn[first].wait(20)
        drawn = torch.rand(3, device="cpu").tolist()
        has_drawn[replica].set()
        return drawn

    torch.manual_seed(3)
    drawn = run_parallel([lambda: draw(0), lambda: draw(1)], [CPU, torch.device("meta")])
    assert [drawn[first], drawn[1 - first]] == drawn_in_turn


class _Accelerators:
    """Three devices and their generators, in place of those that this machine may not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seeds: int) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        monkeypatch.setattr(
            torch, "get_device_module", lambda device: SimpleNamespace(default_generators=self.generators)
        )
        self.devices = [torch.device("cuda", i) for i in range(len(seeds))]

    def seeds(self) -> list[int]:
        return [generator.initial_seed() for generator in self.generators]


def test_accelerators_that_were_seeded_alike_get_seeds_of_their_own(monkeypatch):
    """As ``torch.manual_seed`` seeds them. The first keeps its own; the same seed always leads to the same others."""
    found = _Accelerators(monkeypatch, 5, 5, 5)
    separate_seeds(found.devices)
    assert found.seeds() == [5, seed_of(5, 1), seed_of(5, 2)] and len(set(found.seeds())) == 3
    states = [generator.get_state() for generator in found.generators]
    separate_seeds(found.devices)  # in the next forward: they go on
    assert all(torch.equal(g.get_state(), state) for g, state in zip(found.generators, states, strict=True))


def test_accelerators_that_have_seeds_of_their_own_keep_them(monkeypatch):
    found = _Accelerators(monkeypatch, 5, 6)
    separate_seeds([*found.devices, CPU, CPU])
    assert found.seeds() == [5, 6]


def test_a_seed_is_one_that_generators_take():
    assert all(0 <= seed_of(seed, 1) < 2**63 for seed in (0, 1, 2**63, 67280421310721))


# -- exceptions


class Failing(nn.Module):
    """Raises where a row is negative; the row's number says what."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.ran: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(x[0].item())
        if x[0] < 0:
            self.break_down(x[0].item())
        return x * self.weight

    def break_down(self, value: float) -> None:
        raise {-1.0: KeyError("missing"), -2.0: KeyboardInterrupt("stop"), -3.0: OSError(5, "no such row")}[value]


def _failure(model: KnownDDP, *rows: float) -> BaseException:
    threads = threading.active_count()
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        model(torch.tensor(rows))
    assert threading.active_count() == threads
    return caught.value


@pytest.mark.parametrize("replica", [0, 1, 2])
@pytest.mark.parametrize(("value", "kind"), [(-1.0, KeyError), (-2.0, KeyboardInterrupt), (-3.0, OSError)])
def test_an_exception_keeps_its_type_and_traceback_and_names_the_replica(replica, value, kind):
    model = KnownDDP(Failing(), device_ids=THREE)
    rows = [1.0, 2.0, 3.0]
    rows[replica] = value
    error = _failure(model, *rows)
    assert type(error) is kind
    text = "".join(traceback.format_exception(error))
    assert "in break_down" in text and f"raised in replica {replica} of 3, on cpu" in text
    # The wrapper is as good as before.
    model(torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert model.module.weight.grad.item() == 7


def test_the_first_exception_counts_and_no_replica_on_that_device_runs_after_it():
    model = KnownDDP(Failing(), device_ids=THREE)
    assert isinstance(_failure(model, 1.0, -3.0, -1.0), OSError)
    assert model.module.ran == [1, -3]


def test_an_exception_leaves_nothing_behind():
    """Replicas, and with them copies of all parameters, go with the exception."""
    model = KnownDDP(Failing(), device_ids=THREE)
    made: list[weakref.ref[Any]] = []
    model.module.register_forward_pre_hook(lambda module, _: made.append(weakref.ref(module)))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            model(torch.tensor([1.0, 2.0, -1.0]))
        assert len(made) == 3 and [ref() for ref in made] == [model.module, None, None]
    finally:
        gc.enable()


def test_a_thread_that_cannot_be_started_ends_the_others(monkeypatch):
    model, start, started = KnownDDP(Failing(), device_ids=THREE), threading.Thread.start, []

    def fail_at_second(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_at_second)
        assert "can't start new thread" in str(_failure(model, 1.0, 2.0, 3.0))
    assert model.module.ran == [] and not started[0].is_alive()
    assert model(torch.tensor([1.0, 2.0])).tolist() == [1, 2]


class _Interrupting(Failing):
    """The last replica interrupts the caller, who waits for it, and goes on for a while.

    The sleeps order nothing: they leave room for the caller to come to its wait, and to go away too early.
    """

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name == "knownddp replica 2":
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        return super().forward(x)


def test_an_interrupt_of_the_waiting_caller_leaves_no_thread():
    model = KnownDDP(_Interrupting(), device_ids=THREE)
    assert isinstance(_failure(model, 1.0, 2.0, 3.0), KeyboardInterrupt)
    assert model.module.ran == [1, 2, 3]


# -- turns


def test_replicas_on_different_devices_run_at_the_same_time():
    """Each waits for the other. Nothing is computed, so any names of devices will do."""
    barrier = threading.Barrier(2, timeout=20)
    assert sorted(run_parallel([barrier.wait] * 2, [CPU, torch.device("meta")])) == [0, 1]


def test_a_failure_on_one_device_lets_others_end():
    def fail() -> None:
        raise ValueError("first")

    ran = []
    with pytest.raises(ValueError, match="first"):
        run_parallel([fail, lambda: ran.append(1), lambda: ran.append(2)], [CPU, torch.device("meta"), CPU])
    assert ran == [1]


def test_a_caller_without_accelerator_has_no_streams():
    state = CallerState([CPU, CPU])
    with state.caller_thread(CPU), state.worker_thread(CPU):
        assert torch.is_grad_enabled()


# -- growth


def _steps(model: KnownDDP, number: int) -> None:
    for step in range(number):
        model.zero_grad()
        model(inputs(0, 6, 3, seed=step), [step % 4]).square().mean().backward()


def _objects_after(model: KnownDDP, steps: int) -> int:
    _steps(model, steps)
    gc.collect()
    return len(gc.get_objects())


def test_two_hundred_steps_leave_nothing_behind():
    """A leak would show in each window of steps. Reference cycles hold no copy of a parameter."""
    model = KnownDDP(Skippable(), device_ids=THREE, find_unused_parameters=True)
    _steps(model, 50)
    threads = threading.active_count()
    made: list[weakref.ref[Any]] = []
    handle = model.module.register_forward_pre_hook(lambda module, _: made.append(weakref.ref(module.layers[0].weight)))
    gc.disable()
    try:
        _steps(model, 3)
        assert len(made) == 9 and {id(ref()) for ref in made} == {id(model.module.layers[0].weight), id(None)}
    finally:
        gc.enable()
    handle.remove()
    made.clear()
    counts = [_objects_after(model, 50) for _ in range(4)]
    assert min(after - before for before, after in itertools.pairwise(counts)) <= 0, counts
    assert threading.active_count() == threads
    assert private.current_graph_task() == private.NO_GRAPH_TASK


def test_dropped_outputs_take_their_replicas_with_them():
    model = KnownDDP(Skippable(), device_ids=THREE)
    made: list[weakref.ref[Any]] = []
    model.module.register_forward_pre_hook(lambda module, _: made.append(weakref.ref(module)))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model(inputs(0, 6, 3))
        assert [ref() is not None for ref in made] == [True, False, False] * 3
    finally:
        gc.enable()


def test_copies_train_on_their_own():
    plain, model = make(device_ids=THREE)
    other = copy.deepcopy(model)
    other(inputs(0, 6, 3)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert_grads(other, mean_grads(plain, 1, lambda m, _: m(inputs(0, 6, 3)).square().sum()))
