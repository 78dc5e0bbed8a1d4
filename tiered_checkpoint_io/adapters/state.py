"""States with sharded tensors: a rank's own part of one, the whole, and such tensors taken out of a callback's state.

A local checkpoint holds a rank's own part, and needs no collective. The sharded tensors in the state of a callback of
Lightning's, which a pickle would cut to one rank's shard, are saved with the model's, and leave a note.

All else that Lightning saves is pickled before the save returns, and made a file later.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tiered_checkpoint_io.adapters.calls import as_save_error
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError

#: The key that marks a note, and below which the tensors are saved.
SHARDED = "tiered_sharded"
#: Containers that are looked into, besides dictionaries; others are pickled whole.
_LISTS = (list, tuple)
_SHARDED = (DTensor, ShardedTensor)
_PLAIN = {bool, int, float, str, type(None)}


def _mapped(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Copies the containers of a state, with the values that ``replace`` returns."""
    replaced = replace(value)
    if replaced is not value:
        return replaced
    if isinstance(value, dict):
        # Of its own type, and with its attributes: modules keep versions in those.
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = _mapped(each, replace)
        return copied
    if type(value) in _LISTS:
        return type(value)(_mapped(each, replace) for each in value)
    return value


# ------------------------------------------------------------------------------------------- local
def local_part(state: Any) -> Any:
    """Returns the state with this rank's own tensor for each DTensor, and a list of them for a ShardedTensor."""
    return _mapped(state, _own_part)


def _own_part(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, Stateful) and not isinstance(value, torch.Tensor | dict):
        return local_part(value.state_dict())
    return value


def fill(state: dict[str, Any], loaded: Any, *, where: str) -> None:
    """Puts a loaded state, which is copied, into a state: tensors in place, all else replaced.

    As with DCP, values without a key in the state are left out. An empty dictionary, such as the state of an optimizer
    that has made no step yet, takes all.

    Raises:
        RestoreError: A key, or a tensor's shape, is another one.
    """
    memo: dict[int, Any] = {}
    _Filling(where, lambda value: copy.deepcopy(value, memo)).dictionary(state, loaded, "")


class _Filling:
    def __init__(self, where: str, own: Callable[[Any], Any]) -> None:
        self._where = where
        #: Copies tensors that stay in the state after the load; a shared tensor stays shared.
        self._own = own

    def dictionary(self, state: dict[Any, Any], loaded: Any, path: str) -> None:
        if not isinstance(loaded, dict):
            raise self._other(path, "a dictionary", loaded)
        if not state:
            state.update(self._own(loaded))
            return
        for key in list(state):
            here = f"{path}.{key}" if path else str(key)
            if key not in loaded:
                raise RestoreError(
                    f"the checkpoint has no {here!r}",
                    operation="load",
                    key=self._where,
                    hint="leave it out of the state, or load another checkpoint",
                )
            state[key] = self.value(state[key], loaded[key], here)

    def value(self, state: Any, loaded: Any, path: str) -> Any:
        if isinstance(state, DTensor):
            self._copy(state.to_local(), loaded, path)
        elif isinstance(state, ShardedTensor):
            shards = state.local_shards()
            if not isinstance(loaded, list) or len(loaded) != len(shards):
                raise self._other(path, f"{len(shards)} shards", loaded)
            for shard, source in zip(shards, loaded, strict=True):
                self._copy(shard.tensor, source, path)
        elif isinstance(state, torch.Tensor):
            if _has_parts(state) and isinstance(loaded, torch.Tensor):
                # Made of several tensors, whose sizes may be others.
                return _apart(loaded)
            self._copy(state, loaded, path)
        elif isinstance(state, dict):
            self.dictionary(state, loaded, path)
        elif isinstance(state, Stateful):
            own = state.state_dict()
            self.dictionary(own, loaded, path)
            state.load_state_dict(own)
        elif type(state) in _LISTS and type(loaded) is type(state) and len(loaded) == len(state):
            pairs = enumerate(zip(state, loaded, strict=True))
            values = [self.value(mine, theirs, f"{path}[{index}]") for index, (mine, theirs) in pairs]
            if not isinstance(state, list):
                return type(state)(values)
            state[:] = values
        else:
            return self._own(loaded)
        return state

    def _copy(self, target: torch.Tensor, source: Any, path: str) -> None:
        if not isinstance(source, torch.Tensor):
            raise self._other(path, "a tensor", source)
        if target.shape != source.shape:
            raise RestoreError(
                f"{path!r} has shape {tuple(target.shape)} on this rank, {tuple(source.shape)} in the checkpoint",
                operation="load",
                key=self._where,
                hint="local checkpoints are loaded by ranks that shard as those did that saved them",
            )
        with torch.no_grad():
            # Of a quantized one, a detached alias would take the scales for itself.
            (target if target.is_quantized else target.detach()).copy_(source)

    def _other(self, path: str, wanted: str, found: Any) -> RestoreError:
        return RestoreError(
            f"{path or 'the state'!r} is {wanted} on this rank, and a {type(found).__name__} in the checkpoint",
            operation="load",
            key=self._where,
        )


def _has_parts(tensor: torch.Tensor) -> bool:
    return tensor.is_nested or tensor.layout != torch.strided


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    copied: torch.Tensor = torch.load(file, weights_only=False)
    return copied


# -------------------------------------------------------------------------------------------- full
def with_state_dicts(state: Any) -> Any:
    """Returns the state, with its ``state_dict()`` for each ``Stateful``."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Stateful) and not isinstance(value, torch.Tensor | dict):
            return with_state_dicts(value.state_dict())
        return value

    return _mapped(state, replaced)


def gathered(
    state: Any, take: Callable[[Any], list[Any] | None], *, keep: bool
) -> tuple[Any, TieredCheckpointError | None]:
    """Gathers whole tensors on the rank that keeps them; the other ranks get None for each.

    ``take`` gathers an object of each rank on that rank. Also returns this rank's error, if any: the rank still makes
    the following collectives, because the other ranks do.
    """
    failed: list[Exception] = []

    def tried(make: Callable[[], Any]) -> Any:
        try:
            return make() if not failed else None
        except Exception as error:
            failed.append(error)
            return None

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            full = value.full_tensor()
            return tried(lambda: full.detach().cpu()) if keep else None
        if isinstance(value, ShardedTensor):
            parts = take(tried(lambda: [_on_cpu(each) for each in value.local_shards()]))
            return tried(lambda: _assembled(value, parts)) if parts is not None else None
        return value

    mapped = _mapped(state, whole)
    return mapped, as_save_error(failed[0]) if failed else None


def _on_cpu(shard: Any) -> tuple[list[int], torch.Tensor]:
    """Returns a shard's offsets, and a copy without the memory around it, which would be sent as well."""
    tensor = shard.tensor.detach()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return shard.metadata.shard_offsets, copied


def _assembled(value: ShardedTensor, parts: Sequence[Any]) -> torch.Tensor:
    # torch's own gather() takes all numbers for float32 on its way.
    whole = torch.empty(value.size(), dtype=value.dtype, device="cpu")
    # Of a rank that has failed there are none; the error says why, and no part is saved.
    here = [each for part in parts for each in part or ()]
    wanted = {tuple(shard.shard_offsets) for shard in value.metadata().shards_metadata}
    if None not in parts and wanted - {tuple(offsets) for offsets, _ in here}:
        raise ConfigError(
            "a ShardedTensor lies on ranks that do not take part",
            operation="save",
            hint="give all ranks that hold the state as process_group",
        )
    for offsets, tensor in here:
        place = whole
        for dim, (start, length) in enumerate(zip(offsets, tensor.shape, strict=True)):
            place = place.narrow(dim, start, length)
        place.copy_(tensor)
    return whole


# ----------------------------------------------------------------------------------------- sharded
def part_off(state: Any, model: Mapping[str, Any]) -> tuple[Any, dict[str, DTensor]]:
    """Returns the same state with a note for each sharded tensor, and these; ``model`` has the model's, by names.

    Raises:
        ConfigError: A tensor is sharded in a way that can't be made again from a note.
    """
    tensors: dict[str, DTensor] = {}
    found = {id(tensor): path for tensor, path in _sharded_in(state, ())}
    if not found:
        return state, tensors
    named: dict[Any, dict[str, None]] = {}
    for name, each in model.items():
        if isinstance(each, DTensor):
            named.setdefault(_layout(each), {})[name] = None

    def part(value: Any) -> Any:
        if not isinstance(value, _SHARDED):
            return value
        note = _note(value, tensors)
        # A run on another mesh lays it out like the parameter with which it is computed.
        alike = named.get(_layout(tensors[note[SHARDED]]), {})
        return {**note, "as": next((name for name in found[id(value)] if name in alike), next(iter(alike), None))}

    return _mapped(state, part), tensors


def _sharded_in(value: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields each sharded tensor in a state, with the keys that lead to it."""
    # Training waits for this at each save, and nearly all is plain.
    if isinstance(value, dict):
        for key, each in value.items():
            if type(each) not in _PLAIN:
                yield from _sharded_in(each, (*path, str(key)))
    elif type(value) in _LISTS:
        for each in value:
            if type(each) not in _PLAIN:
                yield from _sharded_in(each, path)
    elif isinstance(value, _SHARDED):
        yield value, path


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.device_mesh, tuple(tensor.placements)


def make_again(state: Any, meshes: Sequence[DeviceMesh], model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Makes tensors to load into, for each note of :func:`part_off`; raises ConfigError if no mesh of the run fits."""
    made: dict[str, torch.Tensor] = {}
    _with_notes(state, lambda note: made.setdefault(note[SHARDED], _like(note, meshes, model)))
    return made


def put_back(state: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the state with the tensors for their notes."""
    return _with_notes(state, lambda note: tensors[note[SHARDED]])


def _with_notes(state: Any, replace: Callable[[Any], Any]) -> Any:
    def put(value: Any) -> Any:
        return replace(value) if type(value) is dict and SHARDED in value else value

    return _mapped(state, put)


def _note(tensor: DTensor | ShardedTensor, tensors: dict[str, DTensor]) -> dict[str, Any]:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    known = all(type(placement) in (Shard, Replicate, _StridedShard) for placement in placements)
    if not isinstance(tensor, DTensor) or not known or not tensor.device_mesh.mesh_dim_names:
        raise ConfigError(
            "a callback's state holds a sharded tensor that can't be described, such as FSDP1's ShardedTensor",
            operation="save",
            hint="let it hold DTensors over a mesh whose dimensions have names, or gather it before it is saved",
        )
    name = str(len(tensors))
    tensors[name] = tensor
    return {
        SHARDED: name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "mesh": list(tensor.device_mesh.mesh_dim_names),
        # None: a copy on each rank of that dimension of the mesh.
        "dims": [getattr(placement, "dim", None) for placement in placements],
        # Of FSDP2 on top of tensor parallel: into how many pieces that has cut the same dimension before.
        "cut": [getattr(placement, "split_factor", None) for placement in placements],
    }


def _like(note: Mapping[str, Any], meshes: Sequence[DeviceMesh], model: Mapping[str, Any]) -> torch.Tensor:
    twin, dtype = model.get(note.get("as") or ""), getattr(torch, note["dtype"])
    if isinstance(twin, torch.Tensor) and list(twin.shape) == note["shape"]:
        return torch.zeros_like(twin.detach(), dtype=dtype)
    names = tuple(note["mesh"])
    part = next((mesh for mesh in meshes if mesh.mesh_dim_names == names), None)
    if part is None:
        whole = next((mesh for mesh in meshes if set(names) <= set(mesh.mesh_dim_names or ())), None)
        if whole is None:
            raise ConfigError(
                f"a callback's state is sharded over {names}, which no mesh of this strategy and model has",
                operation="load",
            )
        part = whole[names]
    placements = [_placement(dim, cut) for dim, cut in zip(note["dims"], note["cut"], strict=True)]
    shape = torch.Size(note["shape"])
    made: DTensor = torch.distributed.tensor.zeros(shape, dtype=dtype, device_mesh=part, placements=placements)
    return made


def _placement(dim: int | None, cut: int | None) -> Placement:
    if dim is None:
        return Replicate()
    strided: Placement = _StridedShard(dim, split_factor=cut) if cut is not None else Shard(dim)
    return strided


#: The protocol of torch.save.
_PROTOCOL = 2
#: Types that torch.save writes apart from its pickle.
_APART = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


class _ApartError(Exception):
    """Raised by a pickler that finds a tensor."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _APART):
            raise _ApartError
        return NotImplemented


class _Written:
    """A placeholder of a pickler, which writes the output of another pickler."""

    def __init__(self, file: BinaryIO, **_: Any) -> None:
        self._file = file

    def dump(self, pickled: bytes) -> None:
        self._file.write(pickled)


class Rest:
    """A copy of a state as it is now, unaffected by later changes.

    Attributes:
        sharded: The sharded tensors in it, which are saved together with the model's.
    """

    def __init__(self, rest: dict[str, Any], model: Mapping[str, Any]) -> None:
        """Pickles the state.

        Args:
            rest: Anything.
            model: The model's own tensors, by their names.

        Raises:
            ConfigError: A sharded tensor can't be described.
            Exception: Errors of ``torch.save`` for the state.
        """
        self.sharded: dict[str, DTensor] = {}
        self._pickled: bytes | None = None
        self._file = io.BytesIO()
        data = io.BytesIO()
        # Training waits for this, and mostly there are no tensors: then no other code has to look through it.
        try:
            _PlainPickler(data, _PROTOCOL).dump(rest)
            self._pickled = data.getvalue()
        except _ApartError:
            parted, self.sharded = part_off(rest, model)
            torch.save(parted, self._file)

    def file(self) -> bytes:
        """Returns the file that ``torch.save`` writes."""
        if self._pickled is not None:
            module: Any = SimpleNamespace(Pickler=_Written, __name__="pickle")
            torch.save(self._pickled, self._file, pickle_module=module)
            self._pickled = None
        return self._file.getvalue()
