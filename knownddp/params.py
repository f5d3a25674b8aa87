"""From a module to its managed parameters, and from what a user names to their indices."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from . import _torch_private as private
from .errors import DeclarationError, DeviceError, ModelError, UnknownParameterError, shorten
from .flat import canonical_strides, is_dense, row_major
from .ownership import COUNTS_TELL
from .specs import BucketKey, ParamSpec

Unused = Iterable[Tensor | nn.Module | str]

NOTHING: frozenset[int] = frozenset()

ORIGINAL = "knownddp_original"  # the attribute by which parts of a replica lead to those of the module


def original_of(part: Any) -> Any:
    """What a module or parameter of a replica stands for; any other object is its own."""
    return getattr(part, ORIGINAL, part)


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Qualified names of parameters and buffers that ``_ddp_params_and_buffers_to_ignore`` exempts, at any depth."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in getattr(child, "_ddp_params_and_buffers_to_ignore", ())
    )


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Like ``named_modules`` with duplicates, but not into an inner data-parallel wrapper: it owns what it holds."""
    if isinstance(module, DistributedDataParallel):
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from own_modules(child, f"{prefix}.{name}" if prefix else name)


# A module's dict and the name in it -> what stands there.
_parameter_at: Callable[[dict[str, nn.Parameter | None], str], nn.Parameter | None] = dict.get


_requires_grad: Callable[[nn.Parameter | None], bool] = operator.attrgetter("requires_grad")


def trainable_of(live: Sequence[nn.Parameter | None]) -> list[bool]:
    """Which require a gradient; one that was removed does not."""
    try:
        return list(map(_requires_grad, live))
    except AttributeError:
        return [param is not None and param.requires_grad for param in live]


def _addresses(live: Sequence[nn.Parameter | None]) -> list[int] | None:
    """Where they lie; None if that does not tell: on the meta device, or where a parameter was removed."""
    try:
        found = list(map(Tensor.data_ptr, live))  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        return None
    silent = [param for at, param in zip(found, live, strict=True) if not at] if 0 in found else ()
    return found if all(param is not None and not param.numel() for param in silent) else None


class ManagedParams:
    """The parameters a wrapper reduces, in definition order, and every way to name them.

    Frozen parameters are managed too: they may be thawed later. Parameters are read afresh by ``refresh``, since
    modules may replace them, freeze them, or move them to another dtype.

    Args:
        module: the module that is wrapped.
        reduce_dtype: what the gradients of real floating-point parameters travel in; None: their own.
    """

    def __init__(self, module: nn.Module, reduce_dtype: torch.dtype | None = None) -> None:
        self.ignored = ignored_names(module)
        self._reduce_dtype = reduce_dtype
        places: dict[int, list[str]] = {}  # id(parameter) -> qualified names; more than one if it is tied
        self._homes: list[tuple[dict[str, nn.Parameter | None], str]] = []
        # Every place where a managed parameter stands: its module's dict, the name there, and the parameter's index.
        self.places: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        # By id: what stands in for a parameter while a module runs in low precision, with that parameter.
        self.masters: dict[int, Tensor] = {}
        self.names: list[str] = []
        self.live: list[nn.Parameter | None] = []
        indices: dict[int, int] = {}
        sparse_ids: set[int] = set()
        # By id; the module is held so that its id stays its own. A module may be registered at several places.
        self._modules: dict[int, tuple[nn.Module, list[str]]] = {}
        for prefix, child in own_modules(module):
            self._modules.setdefault(id(child), (child, []))[1].append(prefix)
            if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                sparse_ids.add(id(child.weight))
            for name, param in child._parameters.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if param is None or full_name in self.ignored:
                    continue
                index = indices.setdefault(id(param), len(indices))
                self.places.append((child._parameters, name, index))
                if index == len(self.live):
                    self._homes.append((child._parameters, name))
                    self.names.append(full_name)
                    self.live.append(param)
                places.setdefault(id(param), []).append(full_name)
        self.has_inner_wrapper = any(isinstance(m, DistributedDataParallel) for m in module.modules())
        self.sparse = [id(param) in sparse_ids for param in self.live]
        self._places = [places[id(param)] for param in self.live]
        self._index_of_place = {place: i for i, all_of in enumerate(self._places) for place in all_of}
        self._known_names = {*self._index_of_place, *self.ignored}
        for _, prefixes in self._modules.values():
            self._known_names.update(prefixes)
        self._ignored_ids = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n in self.ignored}
        self._covered: dict[int | str, frozenset[int]] = {}
        self._index_of_id = {id(param): i for i, param in enumerate(self.live)}
        self.trainable: list[bool] = []
        self._was_trainable = [param.requires_grad for param in self.live if param is not None]
        self.specs: list[ParamSpec] = []
        self.signature = 0  # 32 bits that ranks with the same dtypes and shapes share
        self._canonical: list[tuple[int, ...]] = []
        self.fits: list[bool] = []  # whether a tensor of dtype and strides of the spec is what ``.grad`` should be
        self._look_alike: Callable[..., bool] = private.never  # whether parameters look as they did when last read
        self._addresses: list[int] | None = None
        self.moved = False  # whether the last ``refresh`` found any in other memory
        self._state: list[object] = []

    def __len__(self) -> int:
        return len(self.names)

    # -- checks

    def check(self) -> None:
        """Refuse a module that cannot be trained.

        Raises:
            ModelError: a parameter is not initialised yet or was made in inference mode, or none requires a gradient.
            DeviceError: parameters lie on devices of different types.
        """
        lazy = [n for n, p in zip(self.names, self.live, strict=True) if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ModelError(
                "Modules with uninitialized parameters can't be used with KnownDDP, as with `DistributedDataParallel`: "
                f"{shorten(lazy)}.\nFix: run a dummy forward pass to initialise the modules, then wrap."
            )
        if not any(p is not None and p.requires_grad for p in self.live) and not self.has_inner_wrapper:
            raise ModelError(
                "KnownDDP, like DistributedDataParallel, is not needed when a module doesn't have any parameter that "
                f"requires a gradient: this one has {len(self)} parameters, all frozen or ignored.\n"
                "Fix: use the module as it is, or set requires_grad before wrapping."
            )
        dead = [n for n, p in zip(self.names, self.live, strict=True) if p is not None and p.is_inference()]
        if dead:
            raise ModelError(
                f"parameters that were made in inference mode cannot be trained: {shorten(dead)}.\n"
                "Fix: build or load the module outside of torch.inference_mode(); torch.no_grad() does no harm."
            )
        by_type: dict[str, str] = {}
        for name, param in zip(self.names, self.live, strict=True):
            if param is not None:
                by_type.setdefault(param.device.type, name)
        if len(by_type) > 1:
            found = ", ".join(f"{name} on {device}" for device, name in by_type.items())
            raise DeviceError(
                f"KnownDDP's input module must be on the same type of devices, but parameters are spread: {found}.\n"
                "Fix: move the module to one device type before wrapping."
            )

    # -- live state

    def refresh(self) -> bool:
        """Read the parameters afresh. Returns whether any became another object, or its dtype, device, shape or strides
        changed.

        A plain tensor that stands in for a parameter during one call (``torch.func.functional_call``) is not adopted;
        the parameter counts as frozen for that call. One that was removed (None) counts as frozen too.
        """
        live = list(itertools.starmap(_parameter_at, self._homes))
        if self.masters:  # a forward inside of a forward, or of a backward that runs modules again
            live = [cast("nn.Parameter | None", self.masters.get(id(param), param)) for param in live]
        is_same = all(map(operator.is_, live, self.live))
        stand_ins: list[int] = []
        if not is_same:
            for i, (param, before) in enumerate(zip(live, self.live, strict=True)):
                if param is not None and param is not before and not isinstance(param, nn.Parameter):
                    stand_ins.append(i)
                    live[i] = before
            is_same = all(map(operator.is_, live, self.live))
        addresses, seen = _addresses(live), self._addresses
        self.moved, self._addresses = addresses is None or addresses != seen, addresses
        # Looks must be compared too: freed memory is used again.
        if is_same and not stand_ins and self._look_alike(*live):
            return False
        self.trainable = trainable_of(live)
        for i in stand_ins:
            self.trainable[i] = False
        whole = [param for param in live if param is not None]
        look_alike = private.looks_of(whole) if len(whole) == len(live) and not stand_ins else private.never
        state: list[object] = []
        for param in live:
            state += (param.dtype, param.device, param.shape, param.stride()) if param is not None else ()
        if is_same and state == self._state:
            self._look_alike = look_alike
            return False
        self._look_alike = private.never
        self.live, self._state = live, state
        self._index_of_id = {id(param): i for i, param in enumerate(live) if param is not None}
        self.specs = [self._spec(i, param) for i, param in enumerate(live)]
        self.fits = [
            param is not None and (spec.key.dtype, spec.strides) == (param.dtype, param.stride())
            for spec, param in zip(self.specs, live, strict=True)
        ]
        self.signature = self._sign()
        self._look_alike = look_alike  # last: what goes wrong before is done again
        return True

    def trainable_now(self) -> list[bool]:
        """Which of the parameters that were read require a gradient by now."""
        return self.trainable if self._look_alike(*self.live) else trainable_of(self.live)

    def are_on_one_device(self) -> bool:
        """Whether the engine runs the hooks of all of them on one thread."""
        return COUNTS_TELL and len({spec.key.device for spec in self.specs}) == 1

    def set_canonical(self, strides: Sequence[tuple[int, ...]]) -> None:
        """Take over the layout that the ranks agreed on; call before the first ``refresh``. Without: row-major."""
        self._canonical = list(strides)

    def _spec(self, i: int, param: nn.Parameter | None) -> ParamSpec:
        if param is None:  # removed from its module: described as it was
            return self.specs[i]
        shape, own = tuple(param.shape), tuple(param.stride())
        agreed = self._canonical[i] if self._canonical else row_major(shape)
        if len(agreed) != len(shape) or canonical_strides(shape, agreed) != agreed:
            agreed = row_major(shape)  # the shape changed after construction
        # Equal up to dimensions of size 1: keep the parameter's own, so that its gradient has its very strides.
        strides = own if canonical_strides(shape, own) == agreed and is_dense(shape, own) else agreed
        travels_in = self._reduce_dtype if self._reduce_dtype and param.dtype.is_floating_point else param.dtype
        key = BucketKey(travels_in, param.device)
        nbytes = param.numel() * travels_in.itemsize
        return ParamSpec(self.names[i], shape, strides, param.numel(), nbytes, key, self.sparse[i])

    def _sign(self) -> int:
        kinds: dict[BucketKey, int] = {}  # device numbers may differ between ranks, the grouping by them may not
        seen = [(str(s.key.dtype), s.key.device.type, kinds.setdefault(s.key, len(kinds)), s.shape) for s in self.specs]
        return zlib.crc32(repr(seen).encode())

    # -- names

    def indices_of(self, tensors: Sequence[Tensor]) -> list[int]:
        """Of those that are managed parameters."""
        try:
            return list(map(self._index_of_id.__getitem__, map(id, tensors)))
        except KeyError:  # one was replaced in its module
            return [i for tensor in tensors if (i := self.index_of(tensor)) is not None]

    def index_of(self, tensor: Tensor) -> int | None:
        """The index of a managed parameter, else None."""
        return self._index_of_id.get(id(tensor))

    def resolve(self, unused: Unused | None) -> frozenset[int]:
        """Indices of the parameters that ``unused`` names.

        A module, or a name or glob that covers one, names all parameters below it; a tied parameter only if all its
        owners are named. Parameters that are not managed (ignored ones) name nothing.

        Raises:
            DeclarationError: not an iterable, or an entry that is no parameter, module or name.
            UnknownParameterError: an entry that is not part of the wrapped module.
        """
        if unused is None:
            return NOTHING
        if isinstance(unused, (str, Tensor)) or (isinstance(unused, nn.Module) and not isinstance(unused, Iterable)):
            raise DeclarationError(
                f"unused_parameters takes an iterable of parameters, modules or names, got a single "
                f"{type(unused).__name__}.\nFix: unused_parameters=[...] with this one inside."
            )
        try:
            # A module container of named parts iterates over their keys, which are names of something else.
            entries = list(unused.values() if isinstance(unused, (nn.ModuleDict, nn.ParameterDict)) else unused)
        except TypeError:
            raise DeclarationError(
                f"unused_parameters takes an iterable of parameters, modules or names, got {type(unused).__name__}."
            ) from None
        found: set[int] = set()
        partly: set[str] = set()  # places of tied parameters
        for entry in entries:
            if isinstance(entry, Tensor):
                found |= self._of_tensor(entry)
            elif isinstance(entry, (nn.Module, str)):
                covered = self._covered.get(entry if isinstance(entry, str) else id(entry))
                found |= self._cover(entry, partly) if covered is None else covered
            else:
                raise DeclarationError(
                    "unused_parameters may hold parameters, modules and names, "
                    f"not {type(entry).__name__}: {entry!r:.80}.\n"
                    "Fix: for number 1 of a ModuleList called blocks give model.module.blocks[1] or 'blocks.1'."
                )
        if partly:
            found |= {i for i, places in enumerate(self._places) if len(places) > 1 and partly.issuperset(places)}
        return frozenset(found)

    def _of_tensor(self, tensor: Tensor) -> frozenset[int]:
        tensor = original_of(tensor)
        i = self.index_of(self.masters.get(id(tensor), tensor))
        if i is not None:
            return frozenset((i,))
        replaced = [i for i, home in enumerate(self._homes) if _parameter_at(*home) is tensor]  # since the last forward
        if replaced:
            return frozenset(replaced)
        if id(tensor) in self._ignored_ids:
            return NOTHING
        raise UnknownParameterError(
            f"unused_parameters holds a tensor of shape {tuple(tensor.shape)} that is no parameter of the wrapped "
            "module.\n"
            "Why: a copy (after a cast, a move or a deep copy) is another parameter.\n"
            "Fix: take it from model.module, or give its name."
        )

    def _cover(self, entry: nn.Module | str, partly: set[str]) -> frozenset[int]:
        """Indices below ``entry``; remembered unless tied parameters make the answer depend on other entries."""
        places = self._places_below(entry)
        indices = {self._index_of_place[place] for place in places if place in self._index_of_place}
        exact = isinstance(entry, str) and entry in self._index_of_place
        tied = set() if exact else {i for i in indices if len(self._places[i]) > 1}
        covered = frozenset(indices - tied)
        partly.update(place for i in tied for place in self._places[i] if place in places)
        if not tied and (isinstance(entry, str) or id(entry) in self._modules):
            self._covered[entry if isinstance(entry, str) else id(entry)] = covered
        return covered

    def _places_below(self, entry: nn.Module | str) -> set[str]:
        if isinstance(entry, nn.Module):
            entry = original_of(entry)
            if id(entry) in self._modules:
                return set().union(*map(self._below, self._modules[id(entry)][1]))
            if isinstance(entry, (nn.ModuleList, nn.Sequential)):  # a slice makes a new container of old modules
                return set().union(*map(self._places_below, entry))
            if isinstance(entry, nn.ParameterList):
                return {place for param in entry for i in self._of_tensor(param) for place in self._places[i]}
            raise UnknownParameterError(
                f"unused_parameters holds a {type(entry).__name__} that is not part of the wrapped module as it was "
                "when it was wrapped.\nFix: take it from model.module, or give its name."
            )
        matches = [entry] if entry in self._known_names else fnmatch.filter(self._known_names, entry)
        if not matches:
            close = difflib.get_close_matches(entry, self._known_names, n=3, cutoff=0.5)
            raise UnknownParameterError(
                f"unused_parameters names {entry!r}, which matches no parameter or module of the wrapped module."
                + (f"\nClosest: {', '.join(map(repr, close))}." if close else "")
                + "\nFix: use a name from model.module.named_modules() or named_parameters(), or a glob of them."
            )
        return set().union(*(self._below(name) for name in matches))

    def _below(self, prefix: str) -> set[str]:
        if not prefix:
            return set(self._index_of_place)
        return {place for place in self._index_of_place if place == prefix or place.startswith(prefix + ".")}

    def stock_indices(self, indices: Sequence[int]) -> list[int]:
        """The numbers that DistributedDataParallel would give them: it counts only what was trainable when wrapped."""
        numbers = list(itertools.accumulate(self._was_trainable, initial=0))
        return [numbers[i] for i in indices if self._was_trainable[i]]

    def names_of(self, indices: Sequence[int]) -> list[str]:
        """Qualified names."""
        return [self.names[i] for i in indices]


def restride(param: nn.Parameter, strides: Sequence[int]) -> None:
    """Lay ``param`` out with ``strides``; values and the Parameter object stay."""
    with torch.no_grad():
        laid_out = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)
        param.data = laid_out.copy_(param)
