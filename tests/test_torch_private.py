"""Each private name of torch that the library uses still exists and means what the library takes it for."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from knownddp import _torch_private as private

TIMEOUT = timedelta(seconds=77)


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def node_of(tensor: Tensor) -> Node:
    return get_gradient_edge(tensor).node


def in_backward(ask: Callable[[], Any], *, of: Tensor) -> list[Any]:
    """What ``ask`` answers in a hook on ``of``, at each call."""
    answers: list[Any] = []
    of.register_hook(lambda _: answers.append(ask()))
    return answers


def in_reentrant_checkpoint(ask: Callable[[], Any], x: Tensor) -> Tensor:
    """``x * 2``, recomputed in a backward of its own inside the outer one; ``ask`` is called there."""

    def run(t: Tensor) -> Tensor:
        doubled = t * 2
        if doubled.requires_grad:  # the first run has gradients off
            doubled.register_hook(lambda _: ask())
        return doubled

    result = checkpoint(run, x, use_reentrant=True)
    assert isinstance(result, Tensor)
    return result


# -- tensors


def test_looks_tell_every_change_of_kind_and_layout():
    """Of dtype, shape, strides and requires_grad, also in memory that stays where it is; and of another type."""

    def made() -> list[nn.Parameter]:
        return [nn.Parameter(torch.arange(4.0).view(2, 2)) for _ in range(3)]

    params = made()
    assert private.looks_of(params)(*params)
    plain = torch.ones(2, 2)
    for change in (
        lambda p: p.requires_grad_(False),
        lambda p: setattr(p, "data", p.data.double()),
        lambda p: setattr(p, "data", p.data.view(torch.int32).view(torch.float32).view(4)),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:1]),
    ):
        params = made()
        looks_alike = private.looks_of(params)
        with torch.no_grad():
            assert looks_alike(*params)
            params[1].add_(1)  # values are not looks
            assert looks_alike(*params)
            change(params[1])
        assert not looks_alike(*params), change
    assert not private.looks_of(made())(*made()[:2], plain)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_without_strides_never_look_alike():
    """Their strides cannot be asked for; torch would abort the process."""

    class Own(Tensor):
        pass

    odd = [
        *(torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2).to_mkldnn()),
        *(
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            torch.ones(2).as_subclass(Own),
        ),
    ]
    for tensor in odd:
        assert not private.looks_of([torch.ones(2), tensor])(torch.ones(2), tensor)
    for tensor in (torch.ones(()), torch.ones(0), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64)):
        assert private.looks_of([tensor])(tensor)


def test_looks_hold_no_tensor():
    params = [nn.Parameter(torch.ones(2))]
    looks_alike, alive = private.looks_of(params), weakref.ref(params[0])
    params.clear()
    assert alive() is None and not looks_alike(torch.ones(2))


# -- the engine


def test_a_queued_callback_runs_once_when_the_backward_is_over():
    x, log = leaf(), []
    y = x * 2
    y.register_hook(lambda _: private.queue_callback(lambda: log.append("over")))
    x.register_hook(lambda _: log.append("leaf"))
    y.sum().backward()
    assert log == ["leaf", "over"]


def test_a_queued_callback_belongs_to_the_innermost_graph_task():
    """Queued inside a reentrant checkpoint, it runs when the checkpoint's own backward is over, before ``x``'s hook."""
    x, log = leaf(), []
    y = in_reentrant_checkpoint(lambda: private.queue_callback(lambda: log.append("over")), x * 1)
    x.register_hook(lambda _: log.append("leaf"))
    y.sum().backward()
    assert log == ["over", "leaf"]


def test_a_queued_callback_is_dropped_unrun_when_the_backward_raises():
    """Before ``except`` clauses run: the library learns of the exception by the callback's destructor."""

    class Callback:
        def __call__(self) -> None:
            ran.append(True)

    ran: list[bool] = []
    alive: list[weakref.ref[Callback]] = []

    def queue(_: Tensor) -> None:
        callback = Callback()
        alive.append(weakref.ref(callback))
        private.queue_callback(callback)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    x = leaf()
    y = x * 2
    y.register_hook(queue)
    x.register_hook(fail)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        assert [ref() for ref in alive] == [None]
    finally:
        gc.enable()
    assert ran == []


def test_queueing_outside_of_a_backward_is_an_error():
    with pytest.raises(RuntimeError, match="backward"):
        private.queue_callback(lambda: None)


def test_the_graph_task_is_one_number_a_backward():
    x = leaf()
    y = x * 2
    numbers = in_backward(private.current_graph_task, of=y), in_backward(private.current_graph_task, of=x)
    assert private.current_graph_task() == private.NO_GRAPH_TASK
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    (first, second), at_leaf = numbers
    assert at_leaf == [first, second]
    assert len({first, second, private.NO_GRAPH_TASK}) == 3
    assert private.current_graph_task() == private.NO_GRAPH_TASK


def test_the_graph_task_inside_a_reentrant_checkpoint_is_another():
    inside: list[int] = []
    y = in_reentrant_checkpoint(lambda: inside.append(private.current_graph_task()), leaf() * 1)
    outside = in_backward(private.current_graph_task, of=y)
    y.sum().backward()
    assert len({*inside, *outside}) == 2


def test_will_execute_foresees_which_leaves_a_backward_reaches():
    used, unused = leaf(), leaf()
    y = used * 2
    answers = in_backward(lambda: [private.will_execute(node_of(t)) for t in (used, unused)], of=y)
    y.sum().backward()
    assert answers == [[True, False]]


def test_will_execute_follows_the_inputs_that_backward_was_asked_for():
    a, b = leaf(), leaf()
    y = a * b
    answers = in_backward(lambda: [private.will_execute(node_of(t)) for t in (a, b)], of=y)
    y.sum().backward(inputs=[b])
    assert answers == [[False, True]]


def test_will_execute_raises_for_a_leaf_that_autograd_grad_was_asked_for():
    """... and only then: the library takes the exception for a sign that no gradient is accumulated."""

    def ask() -> str:
        try:
            return str(private.will_execute(node_of(x)))
        except RuntimeError:
            return "raises"

    x = leaf()
    y = x * 2
    answers = in_backward(ask, of=y)
    torch.autograd.grad(y.sum(), x)
    assert answers == ["raises"]


def test_will_execute_raises_outside_of_a_backward():
    with pytest.raises(RuntimeError):
        private.will_execute(node_of(leaf()))


def test_a_hook_knows_that_the_backward_is_a_compiled_one():
    asked = private.in_compiled_backward
    x = leaf()
    y = x * 2
    answers = in_backward(torch.compiler.disable(asked), of=y)
    y.sum().backward(retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    assert answers == [False, True] and not asked()


def test_the_current_node_is_that_of_the_hooked_tensor():
    x = leaf()
    y = x * 2
    nodes = in_backward(private.current_node, of=y)
    y.sum().backward()
    assert nodes == [y.grad_fn]
    assert private.current_node() is None


# -- distributed autograd: RPC of one process


@pytest.fixture
def _rpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # RPC's own doing
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


def test_without_rpc_there_is_no_distributed_autograd():
    assert not private.rpc_is_running() and not private.in_distributed_autograd()


@pytest.mark.usefixtures("_rpc")
def test_distributed_autograd_is_known_by_its_context():
    assert private.rpc_is_running() and not private.in_distributed_autograd()
    with dist_autograd.context():
        assert private.in_distributed_autograd()
    assert not private.in_distributed_autograd()


@pytest.mark.usefixtures("_rpc")
def test_under_distributed_autograd_a_leaf_is_not_executed_yet_its_hook_runs():
    """The library knows such a backward by that."""
    param = nn.Parameter(torch.ones(2))
    node = node_of(param)
    answers: list[bool] = []
    node.register_hook(lambda *_: answers.append(private.will_execute(node)))
    (param * 2).sum().backward()
    param.grad = None
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(param * 2).sum()])
        gradients = dist_autograd.get_gradients(context_id)
    assert answers == [True, False]
    assert param.grad is None and gradients[param].tolist() == [2, 2]


# -- versions and storage


def test_writes_inside_preserve_versions_do_not_upset_autograd():
    kept, counted = leaf(), leaf()
    losses = (kept * kept).sum(), (counted * counted).sum()
    with torch.no_grad():
        with private.preserve_versions([kept]):
            kept.mul_(3)
        counted.mul_(3)
    assert (kept._version, counted._version) == (0, 1)
    losses[0].backward()  # with the values as they are now
    assert kept.grad is not None and kept.grad.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_a_storage_view_shares_memory_and_is_no_view_to_autograd():
    """Elements 3 to 8 of the storage, 1 to 6 of ``flat``, column by column."""
    flat = torch.arange(10.0)[2:]
    view = private.storage_view(flat, 1, (2, 3), (1, 2))
    assert view.tolist() == [[3, 5, 7], [4, 6, 8]]
    assert not view._is_view()
    view.detach_().zero_()
    assert flat.tolist() == [2, 0, 0, 0, 0, 0, 0, 9]


# -- DistributedDataParallel


def test_inside_the_forward_torch_knows_the_active_wrapper():
    """torch.compile asks ``_get_active_ddp_module`` for a bucket size."""
    outer, inner = object(), object()
    active = DistributedDataParallel._get_active_ddp_module
    with private.inside_ddp_forward(outer):
        with private.inside_ddp_forward(inner):
            assert active() is inner
        assert active() is outer
    assert active() is None


def test_the_active_wrapper_is_forgotten_when_the_forward_raises():
    with pytest.raises(ZeroDivisionError), private.inside_ddp_forward(object()):
        raise ZeroDivisionError
    assert DistributedDataParallel._get_active_ddp_module() is None


def test_the_active_wrapper_is_that_of_torch():
    assert private.active_ddp_module() is None
    with private.inside_ddp_forward(wrapper := object()):
        assert private.active_ddp_module() is wrapper


# -- process groups: of one process, over a store in its memory


@pytest.fixture(scope="module")
def _process_group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
        yield
        dist.destroy_process_group()


def test_there_is_no_default_group_before_init():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        private.default_group()


@pytest.mark.usefixtures("_process_group")
def test_the_default_group_is_the_world():
    assert private.default_group() is dist.group.WORLD


@pytest.mark.usefixtures("_process_group")
def test_a_group_is_registered_until_it_is_destroyed():
    group = dist.new_group([0])
    assert private.is_registered(private.default_group()) and private.is_registered(group)
    dist.destroy_process_group(group)
    assert not private.is_registered(group)


@pytest.mark.usefixtures("_process_group")
def test_the_backends_of_a_group_are_those_of_all_its_devices():
    assert private.backends(private.default_group()) == {"cpu": "gloo", "cuda": "gloo"}
    mixed = dist.new_group([0], backend="cpu:gloo,meta:fake")
    assert private.backends(mixed) == {"cpu": "gloo", "meta": "fake"}
    dist.destroy_process_group(mixed)


@pytest.mark.usefixtures("_process_group")
def test_the_timeout_of_a_group_is_the_one_it_was_made_with():
    assert private.group_timeout(private.default_group()) == TIMEOUT
    group = dist.new_group([0], timeout=timedelta(seconds=5))
    assert private.group_timeout(group) == timedelta(seconds=5)
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("_process_group")
def test_a_group_whose_backend_tells_no_timeout_is_given_torchs_default():
    """Half an hour, but for NCCL."""
    group = dist.new_group([0], backend="fake", timeout=timedelta(seconds=5))
    assert private.group_timeout(group) == timedelta(minutes=30)
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("_process_group")
def test_a_created_group_works_like_one_of_new_group():
    group = private.create_group("a name of its own", [0], "gloo", timedelta(seconds=9))
    try:
        assert group.group_name == "a name of its own" and group.group_desc == "a name of its own"
        assert dist.get_backend(group) == "gloo"
        assert private.group_timeout(group) == timedelta(seconds=9)
        assert dist.get_process_group_ranks(group) == [0]
        assert (dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)) == (0, 1, 0)
        message = torch.tensor([5], dtype=torch.uint8)
        dist.all_reduce(message, op=dist.ReduceOp.BOR, group=group)
        assert message.item() == 5
    finally:
        dist.destroy_process_group(group)
    assert not private.is_registered(group)


@pytest.mark.usefixtures("_process_group")
def test_the_store_of_the_default_group_counts_by_key():
    assert [private.count_in_store(key) for key in ("one", "one", "other", "one")] == [1, 2, 1, 3]
    _, store = dist.distributed_c10d._world.pg_map[private.default_group()]
    assert store.add("one", 1) == 4


@pytest.mark.usefixtures("_process_group")
def test_creating_groups_does_not_count_as_new_group_does():
    """``new_group`` names groups after their number, which must not depend on what one rank alone created."""
    names = []
    for between in (False, True):
        group = dist.new_group([0])
        names.append(int(group.group_name))
        dist.destroy_process_group(group)
        if not between:
            dist.destroy_process_group(private.create_group("between", [0], "gloo", TIMEOUT))
    assert names[1] == names[0] + 1


# -- storages


def test_users_of_a_storage_are_the_tensors_in_it():
    tensor = torch.ones(4)
    assert private.storage_users(tensor) == 1
    views = [tensor[1:], nn.Parameter(tensor.view(2, 2)), tensor.detach()]
    same = tensor
    assert private.storage_users(tensor) == private.storage_users(views[0]) == 4
    del views
    assert private.storage_users(same) == 1
    storage = tensor.untyped_storage()
    assert private.storage_users(tensor) == 2
    del storage
    assert private.storage_users(tensor) == 1


def test_writing_in_place_counts():
    tensor = torch.ones(2)
    before = private.times_written(tensor)
    tensor.add_(1)
    assert private.times_written(tensor) > before
    with torch.inference_mode():
        assert private.times_written(torch.ones(2)) == 0


def test_holders_of_a_tensor_are_python_and_others():
    param, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    grad = torch.ones(4)
    same = grad
    assert private.tensor_holders(same) == 1
    param.grad = other.grad = grad
    assert private.tensor_holders(grad) == 3
    other.grad, product = None, other * grad
    assert private.tensor_holders(grad) == 3
    del product
    assert private.tensor_holders(grad) == 2


# -- modules


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_an_rnn_follows_its_parameters_and_takes_its_lists_back(kind):
    """With float64 in the place of its parameters it computes in float64; with its lists back it is as before."""
    rnn = kind(2, 2)
    own, lists = dict(rnn._parameters), private.rnn_weights(rnn)
    assert all(weight is param for weight, param in zip(lists[0], own.values(), strict=True))
    rnn._parameters.update({name: param.double() for name, param in own.items()})
    assert rnn(torch.ones(1, 1, 2).double())[0].dtype == torch.float64
    assert private.rnn_weights(rnn)[0] is not lists[0]
    rnn._parameters.update(own)
    private.set_rnn_weights(rnn, lists)
    assert all(ours is before for ours, before in zip(private.rnn_weights(rnn), lists, strict=True))
    before = list(lists[0])
    assert rnn(torch.ones(1, 1, 2))[0].dtype == torch.float32
    assert all(ours is weight for ours, weight in zip(private.rnn_weights(rnn)[0], before, strict=True))


def test_hooks_after_accumulation_are_seen_as_they_come_and_go():
    param = nn.Parameter(torch.ones(1))
    assert not private.hooks_after_accumulation(param)
    first = param.register_post_accumulate_grad_hook(lambda _: None)
    hooks = private.hooks_after_accumulation(param)
    second = param.register_post_accumulate_grad_hook(lambda _: None)
    assert len(hooks) == 2
    first.remove()
    second.remove()
    assert not hooks
