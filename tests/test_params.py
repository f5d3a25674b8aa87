"""From a module to its parameters, and from what a user names to their indices."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp.errors import DeclarationError, DeviceError, ModelError, UnknownParameterError
from knownddp.params import ManagedParams, restride


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    """Three blocks of four parameters, and a head of three layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))


OF_A_BLOCK = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
MODEL = Model()
PARAMS = ManagedParams(MODEL)


def of_blocks(*numbers: int) -> list[str]:
    return [f"blocks.{number}.{name}" for number in numbers for name in OF_A_BLOCK]


def of_head(*numbers: int) -> list[str]:
    return [f"head.{number}.weight" for number in numbers]


def managed(module: nn.Module) -> ManagedParams:
    params = ManagedParams(module)
    params.check()
    params.refresh()
    return params


def named(unused: Any, params: ManagedParams = PARAMS) -> list[str]:
    """What ``unused`` names, in definition order."""
    return params.names_of(sorted(params.resolve(unused)))


def test_parameters_are_those_of_the_module_in_definition_order():
    assert PARAMS.names == [name for name, _ in MODEL.named_parameters()]
    assert all(a is b for a, b in zip(PARAMS.live, MODEL.parameters(), strict=True))
    assert len(PARAMS) == 1 + 3 * 4 + 3
    assert [PARAMS.index_of(p) for p in MODEL.parameters()] == list(range(16))
    assert PARAMS.names_of([13, 0]) == ["head.0.weight", "scale"]


# -- naming parameters


@pytest.mark.parametrize(
    ("unused", "names"),
    [
        pytest.param(None, [], id="nothing"),
        pytest.param([], [], id="an empty list"),
        pytest.param([MODEL.scale, MODEL.blocks[1].norm.bias], ["scale", "blocks.1.norm.bias"], id="parameters"),
        pytest.param([MODEL.blocks[2], MODEL.head[0]], of_blocks(2) + of_head(0), id="modules"),
        pytest.param([MODEL.blocks[0].norm, MODEL.blocks[0]], of_blocks(0), id="a module and one inside it"),
        pytest.param([MODEL], PARAMS.names, id="the whole model"),
        pytest.param(["blocks.1", "scale"], ["scale", *of_blocks(1)], id="names"),
        pytest.param(["blocks.1.linear.bias"], ["blocks.1.linear.bias"], id="a parameter's name"),
        pytest.param(["blocks.[0-1].*"], of_blocks(0, 1), id="glob below modules"),
        pytest.param(["blocks.[!1]"], of_blocks(0, 2), id="glob of modules"),
        pytest.param(["*.norm.bias"], [f"blocks.{i}.norm.bias" for i in range(3)], id="glob of parameters"),
        pytest.param(["scale", MODEL.scale, MODEL.head[1]], ["scale", *of_head(1)], id="mixed"),
        pytest.param((MODEL.scale,), ["scale"], id="tuple"),
        pytest.param({MODEL.scale, MODEL.head[2]}, ["scale", *of_head(2)], id="set"),
        pytest.param({"head.0": "any value"}, of_head(0), id="keys of a dict"),
        pytest.param(MODEL.blocks, of_blocks(0, 1, 2), id="ModuleList"),
        pytest.param(MODEL.blocks[1:], of_blocks(1, 2), id="slice of a ModuleList"),
        pytest.param(MODEL.head, of_head(0, 1, 2), id="Sequential"),
        pytest.param([MODEL.blocks], of_blocks(0, 1, 2), id="ModuleList inside"),
        pytest.param([MODEL.blocks[:2], MODEL.head[1:]], of_blocks(0, 1) + of_head(1, 2), id="slices inside"),
        pytest.param([nn.ModuleList([MODEL.blocks[:1], MODEL.head])], of_blocks(0) + of_head(0, 1, 2), id="nested"),
        pytest.param([MODEL.blocks[:0]], [], id="an empty slice"),
    ],
)
def test_unused_parameters_name(unused, names):
    assert named(unused) == names
    assert named(unused) == names, "a remembered answer is the same"


def test_a_generator_names_what_it_yields():
    assert named(MODEL.blocks[i] for i in (0, 2)) == of_blocks(0, 2)
    assert named(MODEL.blocks[1].parameters()) == of_blocks(1)


def test_a_name_is_no_prefix_of_another_name():
    """ "a.1" does not cover "a.10"."""
    model = nn.ModuleDict({"a": nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(11))})
    assert named(["a.1"], managed(model)) == ["a.1.weight"]


@pytest.mark.parametrize(
    ("unused", "message"),
    [
        ("blocks.1", "got a single str"),
        (MODEL.scale, "got a single Parameter"),
        (torch.ones(3), "got a single Tensor"),
        (MODEL.head[0], "got a single Linear"),
        (MODEL.blocks[0], "got a single Block"),
        (7, "got int"),
        ([3], "not int: 3"),
        ([None], "not NoneType: None"),
        ([[MODEL.scale]], "not list"),
    ],
)
def test_what_is_no_iterable_of_parameters_modules_or_names_is_refused(unused, message):
    with pytest.raises(DeclarationError, match=message):
        PARAMS.resolve(unused)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("block.1.norm", r"'block.1.norm', which matches no parameter(?s:.)*Closest: 'blocks.1.norm'"),
        ("scales", r"Closest: 'scale'"),
        ("zzz*", r"'zzz\*', which matches no parameter(?s:.)*or a glob of them"),
        (nn.Linear(2, 2), "Linear that is not part of the wrapped module"),
        (nn.Sequential(MODEL.head[0], nn.Linear(2, 2)), "Linear that is not part of the wrapped module"),
        (torch.ones(3), r"tensor of shape \(3,\) that is no parameter"),
        (MODEL.scale.detach(), "no parameter of the wrapped module"),
        (copy.deepcopy(MODEL).scale, "after a cast, a move or a deep copy"),
    ],
)
def test_what_is_not_part_of_the_model_is_refused(entry, message):
    with pytest.raises(UnknownParameterError, match=message):
        PARAMS.resolve([MODEL.scale, entry])


def test_a_parameter_that_was_replaced_since_the_last_forward_is_known():
    module = Model()
    params = managed(module)
    module.scale = nn.Parameter(torch.zeros(3))
    assert named([module.scale], params) == ["scale"]


# -- ignored parameters


def ignoring(*names: str) -> Model:
    model = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def test_ignored_parameters_are_not_managed_and_name_nothing():
    model = ignoring("scale", "blocks.0.linear.weight")
    params = managed(model)
    assert params.ignored == {"scale", "blocks.0.linear.weight"}
    assert params.names == [name for name in PARAMS.names if name not in params.ignored]
    assert named([model.scale, "blocks.0.linear.weight"], params) == []
    assert named([model.blocks[0].linear, "scale"], params) == ["blocks.0.linear.bias"]


def test_names_to_ignore_are_those_of_the_module_that_holds_them():
    model = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model.blocks[1], ["norm.bias"])
    assert managed(model).ignored == {"blocks.1.norm.bias"}


# -- tied parameters


class Tied(nn.Module):
    """``decoder.weight`` is ``encoder.weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2, bias=False)
        self.decoder = nn.Linear(2, 2)
        self.decoder.weight = self.encoder.weight


TIED = Tied()


@pytest.mark.parametrize(
    ("unused", "names"),
    [
        pytest.param([TIED.encoder], [], id="one owner"),
        pytest.param(["decoder"], ["decoder.bias"], id="the other, by name"),
        pytest.param(["enc*"], [], id="one owner, by glob"),
        pytest.param([TIED.encoder, TIED.decoder], ["encoder.weight", "decoder.bias"], id="both owners"),
        pytest.param(["encoder", TIED.decoder], ["encoder.weight", "decoder.bias"], id="both, by name and module"),
        pytest.param(["*coder"], ["encoder.weight", "decoder.bias"], id="both, by one glob"),
        pytest.param([TIED], ["encoder.weight", "decoder.bias"], id="the model that holds both"),
        pytest.param([TIED.decoder.weight], ["encoder.weight"], id="the parameter itself"),
        pytest.param(["encoder.weight"], ["encoder.weight"], id="by its first name"),
        pytest.param(["decoder.weight"], ["encoder.weight"], id="by its second name"),
    ],
)
def test_a_tied_parameter_is_named_by_itself_or_by_all_its_owners(unused, names):
    params = managed(TIED)
    assert params.names == ["encoder.weight", "decoder.bias"]
    for _ in range(2):  # the second time from memory, where there is one
        assert named(unused, params) == names


# -- inner wrappers


class InnerWrapper(nn.Module):
    """Counts as a DistributedDataParallel, as KnownDDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DistributedDataParallel.register(InnerWrapper)


def test_parameters_of_an_inner_wrapper_are_left_to_it():
    params = managed(nn.ModuleDict({"inner": InnerWrapper(nn.Linear(2, 2)), "own": nn.Linear(2, 2)}))
    assert params.names == ["own.weight", "own.bias"]
    assert params.has_inner_wrapper


def test_an_outer_wrapper_may_have_nothing_of_its_own():
    assert len(managed(nn.ModuleDict({"inner": InnerWrapper(nn.Linear(2, 2))}))) == 0


# -- checks


def test_uninitialised_parameters_are_refused_by_name():
    with pytest.raises(ModelError, match=r"uninitialized parameters(?s:.)*1.weight, 1.bias"):
        ManagedParams(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))).check()


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.ReLU(), id="no parameters"),
        pytest.param(nn.Linear(2, 2).requires_grad_(False), id="frozen"),
        pytest.param(ignoring(*PARAMS.names), id="ignored"),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(model):
    with pytest.raises(ModelError, match="doesn't have any parameter that requires a gradient"):
        ManagedParams(model).check()


def test_devices_of_two_types_are_refused_and_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(DeviceError, match=r"0.weight on cpu, 1.weight on meta"):
        ManagedParams(model).check()


# -- live state


def trainable(params: ManagedParams) -> dict[str, bool]:
    return dict(zip(params.names, params.trainable, strict=True))


def test_refresh_says_nothing_new_where_nothing_changed():
    params = ManagedParams(nn.Linear(2, 3))
    assert params.refresh()
    assert not params.refresh()
    weight, bias = params.specs
    assert (weight.name, weight.shape, weight.strides, weight.numel, weight.nbytes) == ("weight", (3, 2), (2, 1), 6, 24)
    assert weight.key == bias.key == (torch.float32, torch.device("cpu"))


def test_freezing_and_thawing_are_seen():
    """They change no plan, so refresh does not call them a change."""
    model = nn.Linear(2, 2)
    params = managed(model)
    model.bias.requires_grad_(False)
    assert not params.refresh()
    assert trainable(params) == {"weight": True, "bias": False}
    model.bias.requires_grad_(True)
    assert not params.refresh()
    assert trainable(params) == {"weight": True, "bias": True}


def test_a_replaced_parameter_is_adopted():
    model = nn.Linear(2, 2)
    params = managed(model)
    old, model.bias = model.bias, nn.Parameter(torch.ones(2))
    assert params.refresh()
    assert params.live[1] is model.bias
    assert params.index_of(model.bias) == 1 and params.index_of(old) is None
    assert not params.refresh()


@pytest.mark.parametrize("cast", [lambda m: m.double(), lambda m: _set_data(m.parameters())], ids=["double()", ".data"])
def test_a_cast_is_seen(cast):
    """Twice the bytes: weight 2 * 2 * 8."""
    model = nn.Linear(2, 2)
    params = managed(model)
    cast(model)
    assert params.refresh()
    assert params.specs[0].key.dtype is torch.float64 and params.specs[0].nbytes == 32
    assert not params.refresh()


def _set_data(parameters: Iterable[nn.Parameter]) -> None:
    for param in parameters:
        param.data = param.data.double()


def test_a_changed_shape_is_seen():
    model = nn.Linear(2, 2)
    params = managed(model)
    model.weight.data = torch.ones(5, 2)
    assert params.refresh()
    assert (params.specs[0].shape, params.specs[0].numel) == ((5, 2), 10)


def test_a_layout_that_changed_where_the_memory_did_not_is_seen():
    model = nn.Linear(2, 2)
    params = managed(model)
    assert not params.refresh()
    model.weight.data = model.weight.data.t()
    assert params.refresh() and not params.moved
    assert params.specs[0].strides == (2, 1) and params.fits == [False, True]
    model.weight.data = model.weight.data[:1]
    assert params.refresh() and params.specs[0].shape == (1, 2)


def test_memory_that_changed_where_the_layout_did_not_is_told():
    model = nn.Linear(2, 2)
    params = managed(model)
    assert not params.refresh() and not params.moved
    model.weight.data = model.weight.data.clone()
    assert not params.refresh() and params.moved
    assert not params.refresh() and not params.moved


@pytest.mark.parametrize(
    "take", [lambda m: setattr(m, "bias", None), lambda m: delattr(m, "bias")], ids=["None", "del"]
)
def test_a_parameter_taken_from_its_module_counts_as_frozen_and_keeps_its_description(take):
    model = nn.Linear(2, 2)
    params = managed(model)
    specs = list(params.specs)
    take(model)
    params.refresh()
    assert trainable(params) == {"weight": True, "bias": False}
    assert params.specs == specs


def test_a_tensor_that_stands_in_during_a_functional_call_is_not_adopted():
    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            params.refresh()
            seen.append((params.live[0] is weight, params.index_of(weight), trainable(params)))
            return super().forward(x)

    model, seen = Watched(2, 2), []
    weight = model.weight
    params = managed(model)
    torch.func.functional_call(model, {"weight": torch.ones(2, 2)}, torch.ones(1, 2))
    params.refresh()
    assert seen == [(True, 0, {"weight": False, "bias": True})]
    assert trainable(params) == {"weight": True, "bias": True}


# -- layouts


def test_the_agreed_layout_is_taken_over_but_for_dimensions_of_size_1():
    """The first is row-major here and transposed on rank 0. The second, a channels-last 1x1 kernel, keeps its strides
    (3, 1, 3, 3): they differ from the agreed ones only where strides have no meaning."""
    model = nn.ParameterList([torch.ones(2, 3), torch.ones(8, 3, 1, 1).to(memory_format=torch.channels_last)])
    params = ManagedParams(model)
    params.set_canonical([(1, 2), (3, 1, 1, 1)])
    params.refresh()
    assert [spec.strides for spec in params.specs] == [(1, 2), (3, 1, 3, 3)]


def test_without_an_agreed_layout_that_fits_it_is_row_major_whatever_this_rank_has():
    """So that ranks which lay parameters out differently still agree."""
    model = nn.ParameterList([torch.ones(3, 2).t()])
    params = managed(model)
    assert params.specs[0].strides == (3, 1)
    params.set_canonical([(1, 2)])
    for changed, strides in [(torch.ones(3, 4).t(), (3, 1)), (torch.ones(2, 3, 2).mT, (6, 3, 1))]:
        model[0].data = changed
        params.refresh()
        assert params.specs[0].strides == strides


def test_restride_changes_the_layout_and_neither_values_nor_identity():
    param = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    version = param._version
    restride(param, (1, 2))
    assert param.stride() == (1, 2) and param.is_leaf and param.requires_grad
    assert param.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert param._version == version


# -- what ranks compare


def signature(model: nn.Module) -> int:
    params = managed(model)
    params.refresh()
    return params.signature


def test_signatures_are_equal_for_equal_shapes_and_dtypes():
    """Values, layouts and names do not matter."""
    transposed = nn.Linear(2, 3)
    restride(transposed.weight, (1, 3))
    assert signature(nn.Linear(2, 3)) == signature(transposed) == signature(nn.ModuleDict({"x": nn.Linear(2, 3)}))
    assert 0 <= signature(nn.Linear(2, 3)) < 2**32


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(3, 2),
        nn.Linear(2, 3).double(),
        nn.Linear(2, 3, bias=False),
        nn.Linear(2, 3, device="meta"),
        nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3)),
    ],
    ids=["shape", "dtype", "fewer", "device type", "more"],
)
def test_signatures_differ(other):
    assert signature(other) != signature(nn.Linear(2, 3))


# -- modules at several places, parameters that go


def test_a_module_registered_twice_is_declared_by_itself_or_by_all_its_names():
    module = nn.Module()
    module.a = module.b = nn.Linear(2, 2)
    module.c = nn.Linear(2, 2)
    params = ManagedParams(module)
    assert params.names == ["a.weight", "a.bias", "c.weight", "c.bias"]
    assert params.resolve([module.a]) == params.resolve(["a", "b"]) == {0, 1}
    assert params.resolve(["b"]) == params.resolve(["a"]) == frozenset()


def test_a_removed_parameter_is_noticed_once():
    module = nn.Linear(2, 2)
    params = ManagedParams(module)
    assert params.refresh()
    module.bias = None
    assert params.refresh()
    assert not params.refresh()
    assert params.trainable == [True, False] and params.live[1] is None
    assert [spec.name for spec in params.specs] == ["weight", "bias"]


def test_a_module_dict_as_the_list_names_its_modules_not_its_keys():
    module = nn.Module()
    module.a = nn.Linear(2, 2)
    module.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
    params = ManagedParams(module)
    assert params.names_of(sorted(params.resolve(module.heads))) == ["heads.a.weight", "heads.a.bias"]


def test_a_slice_of_a_parameter_list_may_be_an_entry():
    module = nn.ParameterList([torch.ones(1), torch.ones(1), torch.ones(1)])
    params = ManagedParams(nn.ModuleList([module]))
    assert params.resolve([module[:2]]) == {0, 1}


def test_what_stands_in_for_a_parameter_is_taken_for_it():
    model = nn.Linear(2, 2)
    params = managed(model)
    weight, stand_in = model.weight, model.weight.bfloat16()
    assert [(home is model._parameters, name, i) for home, name, i in params.places] == [
        (True, "weight", 0),
        (True, "bias", 1),
    ]
    params.masters[id(stand_in)] = weight
    model._parameters["weight"] = stand_in
    assert not params.refresh()
    assert params.live[0] is weight and params.trainable == [True, True]
    assert params.resolve([model.weight]) == {0} == params.resolve([weight])
    assert params.index_of(stand_in) is None, "an output that is one may have hooks of its own"


def test_places_are_all_of_a_tied_parameter_but_for_ignored_ones():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    model[1].weight = model[0].weight
    model[2]._ddp_params_and_buffers_to_ignore = ["weight"]
    assert [(id(home), i) for home, _, i in ManagedParams(model).places] == [
        (id(model[0]._parameters), 0),
        (id(model[1]._parameters), 0),
    ]
