"""What a Lightning checkpoint holds beside model and optimizers: sharded tensors in it, parted from the rest.

A callback that averages weights puts sharded tensors among its own state. Pickled, each rank's
would hold that rank's shard alone; so they go the way of the model's, and leave a note behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tiered_checkpoint_io.errors import UsageError

#: The key that marks a note, and below which the tensors are saved.
SHARDED = "tiered_sharded"


def part_off(state: Any) -> tuple[Any, dict[str, DTensor]]:
    """The same state with a note in place of each sharded tensor, and these.

    Raises:
        UsageError: A tensor is sharded in a way that can't be made again from a note.
    """
    tensors: dict[str, DTensor] = {}
    return _replaced(state, _is_sharded, lambda tensor: _note(tensor, tensors)), tensors


def make_again(state: Any, mesh: DeviceMesh | None) -> dict[str, DTensor]:
    """Tensors to load into, for each note that a state holds.

    Args:
        state: As :func:`part_off` left it.
        mesh: The device mesh of all ranks.

    Raises:
        UsageError: The mesh has no such dimension.
    """
    made: dict[str, DTensor] = {}
    _replaced(state, _is_note, lambda note: made.setdefault(note[SHARDED], _like(note, mesh)))
    return made


def put_back(state: Any, tensors: Mapping[str, Any]) -> Any:
    """The state with the tensors in place of their notes."""
    return _replaced(state, _is_note, lambda note: tensors[note[SHARDED]])


def _replaced(state: Any, matches: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    if matches(state):
        return replace(state)
    if type(state) is dict:
        return {key: _replaced(value, matches, replace) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replaced(value, matches, replace) for value in state)
    return state


def _is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


def _is_note(value: Any) -> bool:
    return type(value) is dict and SHARDED in value


def _note(tensor: DTensor | ShardedTensor, tensors: dict[str, DTensor]) -> dict[str, Any]:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    known = all(type(placement) in (Shard, Replicate) for placement in placements)
    if not isinstance(tensor, DTensor) or not known or not tensor.device_mesh.mesh_dim_names:
        raise UsageError(
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
        "dims": [placement.dim if isinstance(placement, Shard) else None for placement in placements],
    }


def _like(note: Mapping[str, Any], mesh: DeviceMesh | None) -> DTensor:
    names = tuple(note["mesh"])
    if mesh is None or not set(names) <= set(mesh.mesh_dim_names or ()):
        raise UsageError(
            f"a callback's state is sharded over {names}, which this strategy's mesh does not have", operation="load"
        )
    part = mesh if names == mesh.mesh_dim_names else mesh[names]
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in note["dims"]]
    shape, dtype = torch.Size(note["shape"]), getattr(torch, note["dtype"])
    made: DTensor = torch.distributed.tensor.zeros(shape, dtype=dtype, device_mesh=part, placements=placements)
    return made
