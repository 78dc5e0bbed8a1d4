"""States with sharded tensors: a rank's own part of one, and the rest of a sharded state of Lightning's.

A local checkpoint holds a rank's own part, and needs no collective.
"""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.errors import ConfigError, RestoreError

#: Containers that are looked into, besides dictionaries; others are pickled whole.
_LISTS = (list, tuple)


# ------------------------------------------------------------------------------------------- local
def local_part(state: Any) -> Any:
    """Copies the containers of a state, with this rank's own tensor for each DTensor, a list for each ShardedTensor."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, ShardedTensor):
        return [shard.tensor for shard in state.local_shards()]
    if isinstance(state, dict):
        # Of its own type, and with its attributes: modules keep versions in those.
        copied = copy.copy(state)
        for key, each in state.items():
            copied[key] = local_part(each)
        return copied
    if type(state) in _LISTS:
        return type(state)(local_part(each) for each in state)
    if isinstance(state, Stateful) and not isinstance(state, torch.Tensor):
        return local_part(state.state_dict())
    return state


def fill(state: dict[str, Any], loaded: Any, *, where: str) -> None:
    """Puts a loaded state, which is copied, into a state: tensors in place, all else replaced.

    As with DCP, values without a key in the state are left out. An empty dictionary, such as the state of an optimizer
    that has made no step yet, takes all.
    """
    _Filling(where).dictionary(state, loaded, "")


class _Filling:
    def __init__(self, where: str) -> None:
        self._where = where
        #: Copies of values that stay in the state after the load; a shared tensor stays shared.
        self._copied: dict[int, Any] = {}

    def dictionary(self, state: dict[Any, Any], loaded: Any, path: str) -> None:
        if not isinstance(loaded, dict):
            raise self._other(path, "a dictionary", loaded)
        if not state:
            state.update(copy.deepcopy(loaded, self._copied))
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
            return copy.deepcopy(loaded, self._copied)
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


# ----------------------------------------------------------------------------------------- sharded
class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor | ShardedTensor):
            raise ConfigError(
                "the state of a callback or loop holds a sharded tensor",
                operation="save",
                hint="let on_save_checkpoint gather it: only those of the model and the optimizers are saved as shards",
            )
        return NotImplemented


def pickled_rest(rest: dict[str, Any]) -> bytes:
    """Returns the file of ``torch.save`` for all that Lightning saves beside the model and the optimizers."""
    file, module = io.BytesIO(), SimpleNamespace(Pickler=_Pickler, __name__="pickle")
    torch.save(rest, file, pickle_module=module)
    return file.getvalue()
