"""How tensors travel between devices, as far as that shows without any: what is waited for, and on which stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from knownddp import scattering
from knownddp.outputs import may_fly, to_device
from knownddp.replicas import copied
from knownddp.scattering import moved


class _Somewhere(Tensor):
    """Tells that it lies on ``place``, in pinned memory or not, and takes note of how it is copied."""

    place: torch.device
    pinned: bool
    flew: bool

    @property
    def device(self) -> torch.device:
        return self.place

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def to(self, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        self.flew = non_blocking
        return self


def _somewhere(place: str, *, pinned: bool) -> _Somewhere:
    tensor = torch.ones(2).as_subclass(_Somewhere)
    tensor.place, tensor.pinned = torch.device(place), pinned
    return tensor


@pytest.mark.parametrize("copy_to", [to_device, moved, copied])
@pytest.mark.parametrize(
    ("source", "target", "pinned", "flies"),
    [
        ("cpu", "cuda:0", False, True),
        ("cpu", "cuda:0", True, False),
        ("cpu", "mps:0", False, False),
        ("cuda:0", "cuda:1", False, True),
        ("cuda:0", "cpu", False, False),
    ],
)
def test_a_copy_is_waited_for_where_its_source_or_itself_could_be_seen_too_early(
    copy_to, source, target, pinned, flies
):
    tensor, device = _somewhere(source, pinned=pinned), torch.device(target)
    copy_to(tensor, device)
    assert tensor.flew is may_fly(tensor, device) is flies


class _SparseInput(Tensor):
    """Says so, and takes note of where it is copied to."""

    copied_to: torch.device

    @property
    def layout(self) -> torch.layout:
        return torch.sparse_coo

    def to(self, device: torch.device, **_: Any) -> Tensor:  # type: ignore[override]
        self.copied_to = device
        return self


def test_sparse_inputs_travel_on_the_current_stream(monkeypatch):
    """Here there is no stream at all, so that to ask for one would raise."""
    accelerator = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    tensor = torch.ones(2).as_subclass(_SparseInput)
    moved(tensor, accelerator)
    assert tensor.copied_to == accelerator


def test_each_thread_has_side_streams_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "Stream", lambda device: (threading.current_thread().name, device))
    streams, device = scattering._SideStreams(), torch.device("cuda", 0)
    assert streams.of(device) is streams.of(device)
    found = [streams.of(device)]
    other = threading.Thread(target=lambda: found.append(streams.of(device)), name="other")
    other.start()
    other.join()
    assert found == [(threading.current_thread().name, device), ("other", device)]
