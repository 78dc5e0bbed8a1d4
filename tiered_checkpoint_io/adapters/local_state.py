"""What a rank has of a state, without the other ranks: for local checkpoints. No collective is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.errors import RestoreError

#: Containers that are looked into; others are pickled as they are.
_LISTS = (list, tuple)


def local_part(state: Any) -> Any:
    """The state, with this rank's own tensor in place of each DTensor, and a list of them for a ShardedTensor.

    The containers are copies, the tensors are those of the state itself.
    """
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, ShardedTensor):
        return [shard.tensor for shard in state.local_shards()]
    if isinstance(state, Stateful) and not isinstance(state, torch.Tensor | dict):
        return local_part(state.state_dict())
    if isinstance(state, dict):
        # Of its own type, and with its attributes: modules keep versions in those.
        mapped = copy.copy(state)
        for key, value in state.items():
            mapped[key] = local_part(value)
        return mapped
    if type(state) in _LISTS:
        return type(state)(local_part(value) for value in state)
    return state


def fill(state: dict[str, Any], loaded: Any, *, where: str) -> None:
    """Puts what was loaded into a state: tensors in place, all else replaced.

    As DCP has it, the state says what is wanted; what it has no key for is left out. An empty dictionary,
    such as the state of an optimizer that has made no step yet, takes all.

    Args:
        state: Of the same structure as the one that was saved.
        loaded: What :func:`local_part` gave, as it was loaded; it may be mapped from a file that goes.
        where: The checkpoint, for errors.

    Raises:
        RestoreError: A key, or a tensor's shape, is another one.
    """
    memo: dict[int, Any] = {}
    _Filling(where, lambda value: copy.deepcopy(value, memo)).dictionary(state, loaded, "")


class _Filling:
    def __init__(self, where: str, own: Callable[[Any], Any]) -> None:
        self._where = where
        #: Copies what stays in the state behind the load; what was one tensor stays one.
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
            target.detach().copy_(source)

    def _other(self, path: str, wanted: str, found: Any) -> RestoreError:
        return RestoreError(
            f"{path or 'the state'!r} is {wanted} on this rank, and a {type(found).__name__} in the checkpoint",
            operation="load",
            key=self._where,
        )
