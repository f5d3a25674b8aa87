"""Replicas on an accelerator and on the CPU beside it: one GPU is enough."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Skippable, inputs
from torch import nn

from knownddp import KnownDDP
from knownddp.replicas import Replicas, replicate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = "cuda:0"


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


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_weights_of_a_replica_are_one_chunk(kind):
    replica = replicate(kind(3, 4, num_layers=2, bidirectional=True).to(GPU), torch.device(GPU))
    assert len({weight.untyped_storage().data_ptr() for weight in replica.parameters()}) == 1
    replica(torch.ones(2, 1, 3, device=GPU))[0].sum().backward()
