"""Replicas on an accelerator and on the CPU beside it, or on two accelerators where there are two."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Skippable, inputs
from torch import Tensor, nn

from knownddp import KnownDDP, scattering
from knownddp.outputs import to_device
from knownddp.replicas import Replicas, copied, replicate
from knownddp.rnns import flatten_for_cudnn, is_flat
from knownddp.scattering import moved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda:0"
PLACES = [
    pytest.param([GPU, "cpu"], id="gpu and cpu"),
    pytest.param(
        [GPU, "cuda:1"],
        id="two gpus",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]
KINDS = [nn.RNN, nn.GRU, nn.LSTM]


class Recurrent(nn.Module):
    """Shapes: (batch, time, 3) -> (batch, time, 8)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def _compare(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Outputs, and gradients of the sum of their squares."""
    outputs = []
    for module in (model, plain):
        module.zero_grad()
        outputs.append(module(x))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("device_ids", [[GPU, "cpu"], ["cpu", GPU]], ids=["gpu first", "cpu first"])
@pytest.mark.parametrize("x_on", [GPU, "cpu"])
def test_gradients_are_those_of_the_whole_batch(device_ids, x_on):
    plain = Skippable().to(device_ids[0])
    model = KnownDDP(copy.deepcopy(plain), device_ids=device_ids)
    for step in range(3):
        x = inputs(0, 6, 3, seed=step).to(x_on)
        model.zero_grad()
        plain.zero_grad()
        output = model(x)
        assert output.device == torch.device(device_ids[0])
        output.square().sum().backward()
        plain(x.to(device_ids[0])).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_two_replicas_on_one_gpu_take_turns():
    plain = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(GPU)
    device = torch.device(GPU)
    replicas = Replicas(plain, [device, device], torch.device("cpu"), 0, lambda unused: None)
    x = inputs(0, 6, 3)
    torch.manual_seed(0)
    joined = replicas(x)
    torch.manual_seed(0)
    torch.testing.assert_close(joined, torch.cat([plain(part.to(GPU)) for part in x.chunk(2)]).cpu())


@pytest.mark.filterwarnings("ignore:one process for each device")
@pytest.mark.parametrize("device_ids", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_networks_compute_what_a_plain_one_does(kind, device_ids):
    """In float64, where no kernel rounds to less."""
    plain = Recurrent(kind).to(GPU, torch.float64)
    model = KnownDDP(copy.deepcopy(plain), device_ids=device_ids)
    for step in range(3):
        _compare(model, plain, inputs(0, 6, 5, 3, seed=step).to(GPU, torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_replica_are_one_chunk(kind):
    plain = Recurrent(kind).to(GPU, torch.float64)
    replica = replicate(plain, torch.device(GPU))
    assert len({weight.untyped_storage().data_ptr() for weight in replica.parameters()}) == 1
    x = inputs(0, 6, 5, 3).to(GPU, torch.float64)
    output = replica(x)
    output.square().sum().backward()
    through_replica = [param.grad for param in plain.parameters()]
    plain.zero_grad()
    torch.testing.assert_close(output, plain(x))
    plain(x).square().sum().backward()
    torch.testing.assert_close(through_replica, [param.grad for param in plain.parameters()])


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}, {"proj_size": 2}], ids=str)
def test_the_chunk_that_torch_makes_counts_as_one(options):
    assert is_flat(nn.LSTM(3, 4, num_layers=2, **options).to(GPU))


def test_weights_in_another_order_become_a_chunk():
    """Else torch warns in forward, and a warning is an error here."""
    rnn = nn.LSTM(3, 4, num_layers=2).to(GPU)
    x = torch.ones(2, 1, 3, device=GPU)
    wanted = rnn(x)[0].detach()
    flat = torch.cat([weight.detach().flatten() for weight in rnn.parameters()])
    for weight in rnn.parameters():
        place, flat = flat[: weight.numel()], flat[weight.numel() :]
        weight.data = place.view(weight.shape)
    assert not is_flat(rnn)
    flatten_for_cudnn(rnn)
    torch.testing.assert_close(rnn(x)[0], wanted)


# -- streams


def _delay(*streams: torch.Stream) -> None:
    """For a tenth of a second or so nothing more happens on them."""
    for stream in streams:
        with stream:
            torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("copy_to", [to_device, moved, copied])
def test_pinned_inputs_may_be_overwritten_after_the_call(copy_to):
    device, x = torch.device(GPU), torch.ones(1000).pin_memory()
    _delay(torch.accelerator.current_stream(device), scattering._side_streams.of(device))
    there = copy_to(x, device)
    x.zero_()
    assert there.sum().item() == 1000


@pytest.mark.filterwarnings("ignore:one process for each device")
@pytest.mark.parametrize("device_ids", PLACES)
def test_replicas_see_pinned_inputs_as_they_were_given(device_ids):
    plain = Skippable().to(GPU)
    model = KnownDDP(copy.deepcopy(plain), device_ids=device_ids)
    x = inputs(0, 6, 3)
    given = x.pin_memory()
    for device in {torch.device(name) for name in device_ids} - {torch.device("cpu")}:
        _delay(torch.accelerator.current_stream(device), scattering._side_streams.of(device))
    output = model(given)
    given.zero_()
    torch.testing.assert_close(output, plain(x.to(GPU)))


@pytest.mark.filterwarnings("ignore:one process for each device")
@pytest.mark.parametrize("device_ids", PLACES)
def test_the_caller_may_be_on_a_stream_of_its_own(device_ids):
    plain = Skippable().to(GPU)
    model = KnownDDP(copy.deepcopy(plain), device_ids=device_ids)
    x = inputs(0, 6, 3).to(GPU)
    stream = torch.Stream(torch.device(GPU))
    stream.wait_stream(torch.accelerator.current_stream(torch.device(GPU)))
    for _ in range(2):
        _delay(stream)
        with stream:
            _compare(model, plain, x * 2)  # there only when the delay is over
