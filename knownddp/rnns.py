"""Recurrent layers whose weights lie in one chunk of memory.

[Note: flat RNNs] cuDNN takes all weights of an RNN as one chunk that begins where their storage begins; where they do
not lie like that it copies them in every forward, and torch warns ("RNN module weights are not part of single
contiguous chunk of memory"). ``flatten_parameters`` makes the chunk. Torch calls it when an RNN is made or moved, not
when it is copied or when parameters are laid out anew; and where cuDNN does not apply it does nothing. There the
weights are tensors of their own, unless somebody laid them together, as ``compact_parameters`` does. Both are kept: an
RNN that is one chunk stays one, and one that cuDNN would run becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from ._torch_private import storage_view
from .flat import is_dense


def move_into(flat: Tensor, params: Sequence[nn.Parameter], offsets: Sequence[int]) -> None:
    """Lay ``params`` into ``flat`` (1-D), each from its offset on; strides, values and the Parameter objects stay."""
    with torch.no_grad():
        for param, offset in zip(params, offsets, strict=True):
            param.data = storage_view(flat, offset, param.shape, param.stride()).copy_(param)


def rnns_of(module: nn.Module) -> list[nn.RNNBase]:
    """The recurrent layers in ``module``, each once."""
    return [child for child in module.modules() if isinstance(child, nn.RNNBase)]


def chunk_of(rnn: nn.RNNBase) -> list[nn.Parameter] | None:
    """The weights of ``rnn`` in the order of a chunk: matrices of all layers and directions first, then biases.

    Returns None if they cannot be one: a weight is computed from others (a parametrization) or occurs twice, dtypes or
    devices differ, elements have gaps; and on CUDA, where a chunk is read as row-major, if one is not.
    """
    try:
        weights = [weight for layer in rnn.all_weights for weight in layer]
    except AttributeError:  # one was taken out of its module
        return None
    if not weights or any(type(weight) is not nn.Parameter for weight in weights):
        return None
    if len({(weight.dtype, weight.device) for weight in weights}) > 1 or len(set(map(id, weights))) < len(weights):
        return None
    if any(not is_dense(weight.shape, weight.stride()) or weight.is_meta for weight in weights):
        return None
    if any(weight.is_cuda and not weight.is_contiguous() for weight in weights):
        return None
    return sorted(weights, key=lambda weight: -weight.dim())


def is_flat(rnn: nn.RNNBase) -> bool:
    """Whether the weights of ``rnn`` are one chunk: in its order in one storage, from the beginning of that on.

    Only ``flatten_parameters`` knows exactly where cuDNN wants each; gaps between them may be its own.
    """
    chunk = chunk_of(rnn)
    if chunk is None or not _share_a_storage(chunk):
        return False
    follow = all(one.storage_offset() + one.numel() <= after.storage_offset() for one, after in pairwise(chunk))
    return follow and chunk[0].storage_offset() == 0


def _share_a_storage(weights: Sequence[nn.Parameter]) -> bool:
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def flatten(rnn: nn.RNNBase) -> None:
    """Make the weights of ``rnn`` one chunk, in a storage of their own, if they can be one."""
    rnn.flatten_parameters()
    chunk = chunk_of(rnn)
    if chunk is None or is_flat(rnn):
        return
    if chunk[0].is_cuda and _share_a_storage(chunk):
        return  # cuDNN has an order of its own for them, perhaps
    *offsets, numel = accumulate((weight.numel() for weight in chunk), initial=0)
    move_into(torch.empty(numel, dtype=chunk[0].dtype, device=chunk[0].device), chunk, offsets)


def flatten_for_cudnn(module: nn.Module) -> None:
    """Make one chunk of each RNN that is none, where cuDNN applies; elsewhere nothing happens."""
    for rnn in rnns_of(module):
        if not is_flat(rnn):
            rnn.flatten_parameters()


@contextmanager
def kept_flat(module: nn.Module) -> Iterator[None]:
    """Whatever happens inside to the parameters of ``module``, an RNN that is one chunk before is one afterwards."""
    flat = [rnn for rnn in rnns_of(module) if is_flat(rnn)]
    try:
        yield
    finally:  # what raised may have replaced parameters before
        for rnn in flat:
            if not is_flat(rnn):
                flatten(rnn)
