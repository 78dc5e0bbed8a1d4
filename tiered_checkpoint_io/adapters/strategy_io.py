"""What reads and writes one checkpoint of a sharded strategy of Lightning's, below DCP."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_settings import Shared
from tiered_checkpoint_io.adapters.dcp_writer import Save, TieredStorageWriter
from tiered_checkpoint_io.adapters.rest import Rest
from tiered_checkpoint_io.adapters.state import SHARDED, as_save_error, make_again
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.save.overlap import Overlapped
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.model import ids

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: What Lightning's strategies call the model in a sharded checkpoint: ModelParallel, and FSDP.
MODEL_KEYS = ("state_dict", "model")


class _OfStrategy:
    """A writer or reader of one checkpoint, through the session of a strategy's checkpoint IO. Used once."""

    _of_strategy: Shared

    @property
    def _shared(self) -> Shared:
        return self._of_strategy

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: which checkpoint is meant was said before."""


class StrategyWriter(_OfStrategy, TieredStorageWriter):
    """Writes one checkpoint of a strategy."""

    def __init__(
        self,
        shared: Shared,
        located: ids.Located,
        *,
        durable: bool,
        wait: bool,
        facts: dict[str, Any],
        rest: Rest | None,
        failed: Exception | None,
        seals_in_background: bool = False,
        overlapped: Overlapped | None = None,
    ) -> None:
        """Takes what goes beside the shards, on rank 0, as ``rest``; for the others see what they are called there."""
        super().__init__(shared.session.config, save_to_s3=durable, wait=wait, require_step=False)
        self._of_strategy = shared
        self._save = self._of_thread.save = Save(self.settings, located)
        self._rest = rest
        self.facts, self.failed = facts, failed
        self.seals_in_background, self.overlapped = seals_in_background, overlapped

    def storage_meta(self) -> StorageMeta:
        """As :meth:`TieredStorageWriter.storage_meta`."""
        try:
            if self._rest is not None:
                self.extra = (ids.REST, self._rest.file())
        except Exception as error:
            self.failed = as_save_error(error)
        return super().storage_meta()


class StrategyReader(_OfStrategy, TieredStorageReader):
    """Reads what a strategy was asked for."""

    def __init__(self, shared: Shared, dirpath: str, selector: Selector) -> None:
        super().__init__(shared.session.config)
        self._of_strategy = shared
        self.settings = self.settings.at(dirpath)
        self.selector = selector
        self._chosen: Metadata | None = None

    def choose(self) -> None:
        """Chooses the checkpoint, with all ranks, before DCP is involved, which makes much of every error."""
        self._chosen = super().read_metadata()

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """As :meth:`TieredStorageReader.read_metadata`; the first time, what was chosen."""
        chosen, self._chosen = self._chosen, None
        return chosen if chosen is not None else super().read_metadata(*args, **options)


class StrategyPlanner(DefaultLoadPlanner):
    """Decides what to load when the checkpoint has been chosen: which model key, optimizers, and the rest."""

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: Any,
        reader: StrategyReader,
        optimizers: list[Optimizer],
        trust: Trust,
        *,
        strict: bool,
    ) -> None:
        """Takes the model as the strategy has wrapped it, and its device mesh."""
        super().__init__(allow_partial_load=not strict)
        self._reader = reader
        self._mesh = mesh
        self._trust = trust
        self.model = sharded_state.get_model_state_dict(module)
        self._whole: list[Any] = [sharded_state.get_optimizer_state_dict(module, each) for each in optimizers]
        #: What is loaded of each.
        self.optimizers: list[Any] = []
        #: Of each optimizer, the parameters of which the checkpoint has no state: it had not changed them yet.
        self.unchanged: list[list[str]] = [[] for _ in optimizers]
        self.rest: dict[str, Any] = {}
        self.sharded: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Completes the state to load.

        Raises:
            RestoreError: The checkpoint holds no model, or not the optimizers that are trained.
        """
        assert metadata is not None
        opened = self._reader.opened
        assert opened is not None
        heads = {name.partition(".")[0] for name in metadata.state_dict_metadata}
        key = next((key for key in MODEL_KEYS if key in heads), None)
        missing = [f"optimizer_{i}" for i in range(len(self._whole)) if f"optimizer_{i}" not in heads]
        if key is None or missing:
            raise RestoreError(
                f"{opened.name} holds no {'model' if key is None else ', '.join(missing)}",
                operation="load",
                key=self._reader.checkpoint_id,
                step=opened.step,
                hint="training can't go on from weights alone: load them into the model and fit without ckpt_path"
                if key is not None
                else "it was not saved by a strategy of Lightning's",
            )
        self.rest = self._read_rest(opened.small)
        # The module may have made meshes of its own, which its parameters alone know.
        own = [each.device_mesh for each in self.model.values() if isinstance(each, DTensor)]
        self.sharded = make_again(self.rest, [*([self._mesh] if self._mesh is not None else []), *own], self.model)
        self._leave_out_unchanged(metadata)
        state_dict[key] = self.model
        state_dict.update({f"optimizer_{i}": each for i, each in enumerate(self.optimizers)})
        state_dict.update({SHARDED: self.sharded} if self.sharded else {})
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _leave_out_unchanged(self, metadata: Metadata) -> None:
        # An optimizer makes a parameter's state at the first step that has a gradient for it; here, DCP has made all.
        # Made anew each time: where this checkpoint is damaged, the next one may hold others.
        paths = (metadata.planner_data or {}).values()
        saved = {tuple(path[:3]) for path in paths if len(path) > 3}
        self.optimizers = [
            {**each, "state": {name: {**of} for name, of in each["state"].items()}} for each in self._whole
        ]
        self.unchanged = [[] for _ in self.optimizers]
        for i, optimizer in enumerate(self.optimizers if paths else ()):
            state = optimizer["state"]
            self.unchanged[i] = [name for name in state if (f"optimizer_{i}", "state", name) not in saved]
            for name in self.unchanged[i]:
                del state[name]

    def _read_rest(self, small: Mapping[str, bytes | memoryview]) -> dict[str, Any]:
        basename = ids.rest_in(small)
        if basename is None:
            raise RestoreError(
                f"there is no {ids.REST} beside the shards",
                operation="load",
                key=self._reader.checkpoint_id,
                hint="it was not saved by a strategy of Lightning's; load it by tiered_checkpoint_io.dcp",
            )
        where = {"key": self._reader.checkpoint_id}
        found: dict[str, Any] = self._trust.read(io.BytesIO(small[basename]), basename, where, map_location="cpu")
        return found
