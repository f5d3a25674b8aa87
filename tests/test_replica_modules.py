"""Several devices in one process: arguments, attributes, and kinds of modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Skippable, assert_grads, inputs, make, mean_grads, raises_everywhere
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from knownddp import ArgumentError, KnownDDP, MeshError, ModelError, PeerError, ReplicaError, replicas
from knownddp.replicas import examine, replicate

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]


def x_of(step: int = 0) -> Tensor:
    return inputs(0, 6, 3, seed=step)


def trains(plain: nn.Module, model: KnownDDP, steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
    """Steps whose gradients are those of the plain module on the whole batch."""
    for step in range(steps):
        x = x_of(step).to(dtype)
        model.zero_grad()
        model(x).square().sum().backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, _, x=x: m(x).square().sum()))


# -- arguments and attributes


@pytest.mark.parametrize("given", [["cpu", "cpu"], [CPU, "cpu:0"], (CPU, CPU), ["cpu"] * 5])
def test_the_cpu_may_be_named_several_times(given):
    plain, model = make(device_ids=given)
    trains(plain, model)
    assert model.device_ids == [CPU] * len(given) and model.output_device == CPU
    assert model.device == CPU and model.device_type == "cpu" and not model.is_multi_device_module and model.dim == 0


def test_one_device_or_none_makes_no_replicas_and_needs_a_process_group():
    for given in (None, [], ["cpu"]):
        with pytest.raises(ValueError, match="Default process group has not been initialized") as caught:
            KnownDDP(Skippable(), device_ids=given)
        assert isinstance(caught.value, ArgumentError) and "torchrun" in str(caught.value)


BAD = [
    ({"device_ids": [0, 1]}, "the module is on the CPU: [0, 1]"),
    ({"device_ids": ["cpu", 0]}, "the module is on the CPU: ['cpu', 0]"),
    ({"device_ids": TWO, "output_device": 0}, "the module is on the CPU: ['cpu', 'cpu', 0]"),
    ({"device_ids": ["meta", "cpu"]}, "on device_ids[0], meta:0, but some are on cpu"),
    ({"device_ids": ["cpu", "cuda:1", "cuda:1"]}, "device_ids name a device twice"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_devices_that_make_no_sense_are_refused(arguments, says):
    with pytest.raises(ArgumentError) as caught:
        KnownDDP(Skippable(), **arguments)
    assert isinstance(caught.value, ValueError) and says in str(caught.value)


def test_a_buffer_elsewhere_is_refused():
    module = Skippable()
    module.register_buffer("mask", torch.zeros(2, device="meta"))
    with pytest.raises(ArgumentError, match=r"parameters and buffers on device_ids\[0\], cpu, but some are on meta"):
        KnownDDP(module, device_ids=TWO)


def _bad_on_one(rank: int) -> None:
    raises_everywhere(
        lambda: KnownDDP(Skippable(), device_ids=["cpu", 0] if rank else TWO), ArgumentError if rank else PeerError
    )


def test_what_is_wrong_on_one_rank_raises_on_every_rank(ranks):
    ranks(2, _bad_on_one)


def _mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    raises_everywhere(lambda: KnownDDP(Skippable(), device_ids=TWO, device_mesh=mesh), MeshError)


def test_a_device_mesh_goes_with_one_device(ranks):
    ranks(2, _mesh)


def _numbers_of_replicas(rank: int) -> None:
    plain, model = make(device_ids=["cpu"] * (rank + 1))
    for step in range(3):
        model.zero_grad()
        model(inputs(rank, 6, 3, seed=step)).square().sum().backward()
        wanted = mean_grads(plain, 2, lambda m, r, s=step: m(inputs(r, 6, 3, seed=s)).square().sum())
        assert_grads(model, wanted)


def test_ranks_may_have_different_numbers_of_devices(ranks):
    ranks(2, _numbers_of_replicas)


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.module.to("meta")])
def test_a_module_that_was_moved_is_refused(move):
    _, model = make(device_ids=TWO)
    move(model)
    with pytest.raises(ReplicaError, match=r"the first of which is on cpu, and is on meta\.\nFix: wrap it again"):
        model(x_of())


REFUSED = {
    "SyncBatchNorm": lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)),
    "RecursiveScriptModule": lambda: nn.Sequential(nn.Linear(3, 3), _script()),
    "KnownDDP": lambda: nn.Sequential(nn.Linear(3, 3), KnownDDP(Skippable(), device_ids=TWO)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def _script() -> nn.Module:
    return torch.jit.script(nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_modules_that_cannot_be_replicated_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=rf"cannot hold a {kind} \(1\)"):
        KnownDDP(REFUSED[kind](), device_ids=TWO)


def test_several_accelerators_in_one_process_are_called_slower():
    with pytest.warns(UserWarning, match="one process for each device"):
        examine(Skippable(), [torch.device("cuda", 0), torch.device("cuda", 1)])


# -- kinds of modules


class _References(nn.Module):
    """Reaches its parts by every way but attributes: lists, dictionaries, methods kept as attributes, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.listed = [self.a, (self.b,)]
        self.by_name = {"scale": self.scale}
        self.step: Any = self._step
        self.register_forward_pre_hook(self._hook)
        self.hooked: list[nn.Module] = []

    def _hook(self, module: nn.Module, _: Any) -> None:
        assert module is self
        self.hooked.append(self)

    def _step(self, x: Tensor) -> Tensor:
        return x * self.by_name["scale"]

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.listed[0], self.listed[1][0]]
        assert parts == [self.a, self.b] and self.by_name["scale"] is self.scale
        assert self.step.__self__ is self
        return self.step(parts[1](parts[0](x)))


def test_a_replica_reaches_its_own_parts_by_any_way():
    plain, model = make(_References, device_ids=TWO)
    trains(plain, model, steps=1)
    assert len(set(map(id, model.module.hooked))) == 2


class _Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.numbers: dict[str, Any] = {f"word {i}": i for i in range(10_000)}
        self.words: list[Any] = list(self.numbers)

    def forward(self, x: Tensor) -> Tensor:
        return self.words[-1](x) if isinstance(self.words[-1], nn.Module) else self.linear(x)


def test_a_vocabulary_is_not_looked_through_word_by_word(monkeypatch):
    """But what is put into it later is found: the module at its end is each replica's own."""
    plain, model = make(_Vocabulary, device_ids=TWO)
    looked_at = []
    monkeypatch.setattr(replicas, "_translated", lambda *args: looked_at.append(args) or TRANSLATED(*args))
    trains(plain, model, steps=1)
    assert len(looked_at) < 200
    model.module.words.append(model.module.linear)
    trains(plain, model, steps=1)
    own = replicate(model.module, CPU)
    assert own.words[-1] is own.linear is not model.module.linear
    assert own.numbers is model.module.numbers


TRANSLATED = replicas._translated


def test_a_replica_has_parameters_and_names_like_the_module():
    replica = replicate(Skippable(2), CPU)
    assert [name for name, _ in replica.named_parameters()] == [name for name, _ in Skippable(2).named_parameters()]
    assert not replica.layers[0].weight.is_leaf and replica.layers[0].weight.requires_grad
    assert replica.training and isinstance(replica, Skippable)


class _Switching(nn.Module):
    """Switches gradients on whatever the caller said, as penalties in evaluation do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad((x * self.weight).square().sum(), self.weight)[0].unsqueeze(0)


def test_a_module_may_switch_gradients_on():
    """The derivative of (3 x)^2 by the weight is 6 x^2: 6 for rows of one, twice that for rows of the square root."""
    model = KnownDDP(_Switching(), device_ids=TWO)
    with torch.no_grad():
        assert model(torch.tensor([[1.0] * 3, [2.0] * 3])).tolist() == [[6] * 3, [24] * 3]


def _complex() -> nn.Module:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([1 + 2j, 3j, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x * self.phase)

    return Phases()


def _with_kept_parameters() -> nn.Module:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = nn.ParameterList(torch.ones(3) * i for i in range(3))
            self.named = nn.ParameterDict({"a": torch.ones(3)})
            self.nothing = None
            self.register_parameter("none", None)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.several[1] * self.named["a"] + self.several[2] * self.several[0]

    return Kept()


def _traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))


MODULES = {
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, batch_first=True)
    ),
    "complex": _complex,
    "parameter lists": _with_kept_parameters,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "traced": _traced,
    "in place": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)),
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_kinds_of_modules_train(build):
    """In float64: a batch in parts is summed in another order, which some of these modules amplify."""
    plain, model = make(lambda: build().double(), device_ids=["cpu"] * 3)
    trains(plain, model, dtype=torch.float64)


def test_a_module_that_changes_its_input_in_place_may():
    """Each replica adds to its own part; the gradient of the weight is then the sum of what it was multiplied with."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1) * self.weight

    model = KnownDDP(Adding(), device_ids=["cpu"] * 3)
    model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert model.module.weight.grad.item() == 9


def test_spectral_norm_keeps_what_replica_0_estimated():
    """Each forward improves the estimate; it counts once, not once a replica."""
    plain, model = make(lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), device_ids=TWO)
    start = torch.tensor([1.0, 0.0, 0.0])
    for module in (plain, model.module):
        module.parametrizations.weight[0]._u.copy_(start)
    torch.testing.assert_close(model(x_of()), plain(x_of()))
    assert not torch.equal(model.module.parametrizations.weight[0]._u, start)
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3, sparse=True)
        self.dense = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.embedding(ids))


def _sparse(rank: int) -> None:
    plain, model = make(_Sparse, device_ids=["cpu"] * 3)
    ids = [torch.tensor([0, 1, 1, 2, 4]), torch.tensor([4, 0, 3, 0, 0])]
    world_size = dist.get_world_size()
    for _ in range(3):
        model.zero_grad()
        model(ids[rank]).square().sum().backward()
        assert model.module.embedding.weight.grad.is_sparse
        got = {n: p.grad.to_dense() for n, p in model.module.named_parameters()}
        wanted = mean_grads(plain, world_size, lambda m, r: m(ids[r]).square().sum())
        torch.testing.assert_close(got, {n: grad.to_dense() for n, grad in wanted.items()})


@pytest.mark.parametrize("world_size", [1, 2])
def test_sparse_gradients_stay_sparse(ranks, world_size):
    ranks(world_size, _sparse)


class _Doubled(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return 2 * weight


def test_a_parametrized_table_is_computed_only_where_it_is_used():
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.utils.parametrize.register_parametrization(embedding, "weight", _Doubled())
    doubled = embedding.parametrizations.weight[0]
    doubled.calls = 0
    replicate(embedding, CPU)
    assert doubled.calls == 0


def test_parameters_of_one_call_are_replicated():
    """``functional_call`` puts plain tensors in the place of parameters."""
    _, model = make(lambda: nn.Linear(3, 2, bias=False), device_ids=TWO)
    weight = torch.ones(2, 3, requires_grad=True)
    output = torch.func.functional_call(model, {"module.weight": weight}, (torch.ones(4, 3),))
    assert output.tolist() == [[3, 3]] * 4
    output.sum().backward()
    assert weight.grad.tolist() == [[4] * 3] * 2 and model.module.weight.grad is None


def test_compiled_modules_run_as_they_were_written_in_replicas():
    compile_it = functools.partial(torch.compile, backend="eager")
    plain, model = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), device_ids=TWO)
    model.module[0] = compile_it(model.module[0])
    wrapped = KnownDDP(model.module, device_ids=TWO)
    wrapped.module[1].compile(backend="eager")
    output = wrapped(x_of())
    output.square().sum().backward()
    wanted = mean_grads(plain, 1, lambda m, _: m(x_of()).square().sum())
    for param, want in zip(wrapped.parameters(), wanted.values(), strict=True):
        torch.testing.assert_close(param.grad, want)


def test_a_compiled_wrapper_trains():
    plain, model = make(device_ids=TWO)
    torch.compile(model, backend="eager")(x_of()).square().sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(x_of()).square().sum()))


# -- the helpers of earlier days


def test_scatter_and_gather_are_methods_too():
    _, model = make(device_ids=TWO)
    args, kwargs = model.scatter((torch.arange(4),), {"mask": torch.arange(4)}, TWO)
    assert [part[0].tolist() for part in args] == [[0, 1], [2, 3]]
    assert [part["mask"].tolist() for part in kwargs] == [[0, 1], [2, 3]]
    assert model.gather([args[0][0], args[1][0]], "cpu").tolist() == [0, 1, 2, 3]
