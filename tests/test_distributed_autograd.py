"""Distributed autograd is left out: a call in its context, and a backward of it, raise instead of not averaging."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from ranks import RankPools
from torch import nn

from knownddp import KnownDDP, UsageError


@pytest.fixture
def own_ranks() -> Iterator[RankPools]:
    """Processes of their own: RPC leaves traces in them."""
    pools = RankPools()
    yield pools
    pools.stop()


def refuse(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TP_SOCKET_IFNAME", "lo")
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # RPC's own doing
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        try:
            _refuse(rank)
        finally:
            rpc.shutdown()


def _refuse(rank: int) -> None:
    net = nn.Linear(2, 1, bias=False)
    model, x = KnownDDP(net), torch.full((1, 2), rank + 1.0)
    with dist_autograd.context():
        with pytest.raises(UsageError, match=rf"rank {rank} of 2.*leaves distributed autograd out"):
            model(x)
        with torch.no_grad():
            assert model(x).shape == (1, 1)

    # Called outside of the context, with a gradient of before, which would be taken for that of this backward.
    model(x).sum().backward()
    assert net.weight.grad is not None and net.weight.grad.tolist() == [[1.5, 1.5]]
    before = model.stats()
    output = model(x)
    with dist_autograd.context() as context_id, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", ".*leaves distributed autograd out")
        with warnings.catch_warnings(record=True) as said, pytest.raises(RuntimeError, match="Error on Node"):
            dist_autograd.backward(context_id, [output.sum()])
        assert len(said) == 1
    assert net.weight.grad.tolist() == [[1.5, 1.5]]
    assert model.stats().buckets_launched == before.buckets_launched

    # Nothing was sent, so that training goes on.
    del output
    net.weight.grad = None
    model(x).sum().backward()
    assert net.weight.grad.tolist() == [[1.5, 1.5]]


def test_distributed_autograd_is_refused_on_every_rank_before_anything_is_sent(own_ranks: RankPools, tmp_path):
    own_ranks.run(2, refuse, str(tmp_path))
