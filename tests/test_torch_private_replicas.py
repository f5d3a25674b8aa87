"""The private names of torch that replicas of a module need: see ``test_torch_private.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import _torch_private as private


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_an_rnn_takes_other_weights(kind):
    rnn = private.shallow_copy(kind(2, 2))
    rnn._parameters = {
        name: torch.ones(shape) for name, shape in zip(rnn._flat_weights_names, SHAPES[kind], strict=True)
    }
    private.renew_rnn_weights(rnn)
    weights, _ = private.rnn_weights(rnn)
    assert all(ours is other for ours, other in zip(weights, rnn._parameters.values(), strict=True))


SHAPES = {
    kind: [(2 * gates, 2), (2 * gates, 2), (2 * gates,), (2 * gates,)]
    for kind, gates in ((nn.RNN, 1), (nn.LSTM, 4), (nn.GRU, 3))
}


def test_a_shallow_copy_has_its_own_dictionaries_of_parts_and_shares_the_rest():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_parameter("weight", nn.Parameter(torch.ones(2)))
    module.listed = [1]
    module.compile(backend="eager")
    copied = private.shallow_copy(module)
    assert type(copied) is nn.Sequential and copied.listed is module.listed and copied.training
    assert copied._modules == module._modules and copied._modules is not module._modules
    assert copied._parameters == {} and module.weight is not None
    assert copied._compiled_call_impl is None and module._compiled_call_impl is not None
    assert private.shallow_copy(module[0])._buffers is not module[0]._buffers


def test_what_torch_compile_returns_leads_to_the_module_it_runs():
    module = nn.Linear(2, 2)
    assert private.compiled_part(torch.compile(module, backend="eager")) is module
    assert private.compiled_part(module) is None


def test_the_innermost_hooks_on_saved_tensors_are_found():
    hooks = torch.autograd.graph.saved_tensors_hooks
    pairs = [(lambda t: t, lambda t: t) for _ in range(2)]
    assert private.saved_tensor_hooks() is None
    with hooks(*pairs[0]), hooks(*pairs[1]):
        assert private.saved_tensor_hooks() == pairs[1]
    assert private.saved_tensor_hooks() is None


def test_hooks_of_a_checkpoint_tell_where_they_are_from():
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(private.saved_tensor_hooks()[0].__module__)
        return x * x

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert seen == ["torch.utils.checkpoint"]


def test_the_cpu_needs_no_generator_of_its_own_and_accelerators_have_one_each():
    assert private.default_generator(torch.device("cpu")) is None
    assert hasattr(torch.cuda, "default_generators")  # filled when CUDA is first used
    if torch.cuda.is_available():
        torch.cuda.init()
        assert private.default_generator(torch.device("cuda", 0)) is torch.cuda.default_generators[0]
