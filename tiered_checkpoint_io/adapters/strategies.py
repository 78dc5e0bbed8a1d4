"""Lightning's sharded strategies over both tiers: FSDP, and ModelParallel (FSDP2, tensor parallel)."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from tiered_checkpoint_io.adapters import dcp
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_settings import Shared
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.fresh_start import FreshStart
from tiered_checkpoint_io.adapters.groups import save_planner
from tiered_checkpoint_io.adapters.io_of import require_tiered_io
from tiered_checkpoint_io.adapters.lightning import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.adapters.read_already import read_already
from tiered_checkpoint_io.adapters.state import SHARDED, make_again, part_off, put_back
from tiered_checkpoint_io.adapters.storage_options import is_resumable, read_storage_options
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.restore import Restored
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    OtherKindError,
    RestoreError,
    SaveError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.model import ids

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    _Base = Strategy
else:
    _Base = object

#: The file beside the shards in which Lightning keeps loops, callbacks and hyperparameters.
_REST = "meta.pt"
#: What Lightning's strategies call the model in a sharded checkpoint: ModelParallel, and FSDP.
_MODEL_KEYS = ("state_dict", "model")


class TieredSharding(_Base):
    """What the sharded strategies have in common; stands before Lightning's own in the class order.

    The state goes to the tiers as sharded tensors that refer to the live parameters: nothing is
    gathered or copied beforehand. Full checkpoints, made by any strategy, load as well.
    """

    _model_key = _MODEL_KEYS[0]
    _saver: CoordinatedSaver | None = None
    _local_file: Path | None = None

    @property
    def _saves_shards(self) -> bool:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- life
    def setup(self, trainer: Trainer) -> None:
        """As upstream.

        Raises:
            UsageError: The trainer's checkpoint IO is not ours.
        """
        self._tiered_io  # noqa: B018 - raises
        super().setup(trainer)

    def teardown(self) -> None:
        """As upstream, which forgets the checkpoint IO."""
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            try:
                self.checkpoint_io.teardown()
            finally:
                super().teardown()

    @property
    def _tiered_io(self) -> TieredCheckpointIO:
        return require_tiered_io(self, type(self).__name__)

    @property
    def _shared(self) -> Shared:
        session = self._tiered_io.checkpointer.session
        if self._saver is None or self._saver._session is not session:
            # In a forked process, the session is another one.
            self._saver = CoordinatedSaver(session, one_series=True)
        return Shared(session, self._saver)

    # ------------------------------------------------------------------------------------ state
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state: sharded tensors that refer to its parameters, or as upstream."""
        if not self._saves_shards:
            full: dict[str, Any] = super().lightning_module_state_dict()
            return full
        return sharded_state.get_model_state_dict(self._wrapped)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state: sharded tensors that refer to its own, or as upstream."""
        if not self._saves_shards:
            full: dict[str, Any] = super().optimizer_state(optimizer)
            return full
        return sharded_state.get_optimizer_state_dict(self._wrapped, getattr(optimizer, "_optimizer", optimizer))

    @property
    def _wrapped(self) -> torch.nn.Module:
        assert self.model is not None
        return self.model

    # ------------------------------------------------------------------------------------- save
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves to both tiers, or those that ``storage_options`` name; every rank calls this.

        Raises:
            SaveError: It failed on some rank, and ``on_save_error`` is ``raise``; on all ranks.
        """
        path = str(self.broadcast(os.fspath(filepath)))
        if not self._saves_shards:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        tiers, metric, may_wait = read_storage_options(storage_options)
        session = self._tiered_io.checkpointer.session
        name = ids.name_in(session.dirpath, path)
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        rest, sharded = part_off(rest)
        state: dict[str, Any] = {self._model_key: checkpoint["state_dict"]}
        state.update({f"optimizer_{i}": each for i, each in enumerate(checkpoint.get("optimizer_states", []))})
        state.update({SHARDED: sharded} if sharded else {})
        step = checkpoint.get("global_step", -1)
        wait = may_wait and "durable" in tiers and not isinstance(self.checkpoint_io, AsyncCheckpointIO)
        writer = _Writer(self._shared, ids.Located(session.dirpath, name, step), durable="durable" in tiers, wait=wait)
        writer.seals_in_background = isinstance(self.checkpoint_io, AsyncCheckpointIO)
        writer.facts = {
            "epoch": checkpoint.get("epoch", -1),
            "metric": metric,
            "resumable": is_resumable(checkpoint, path),
        }
        if self.is_global_zero:
            buffer = io.BytesIO()
            torch.save(rest, buffer)
            writer.extra = (_REST, buffer.getvalue())
        try:
            state_dict_saver.save(state, storage_writer=writer, planner=save_planner("strategy"))
            writer.saver.seal_in_background()
        except CheckpointException as error:
            ranks, first = dcp.first_failure(error)
            if self.is_global_zero:
                session.log.error("Step %d: saving %s failed on ranks %s: %s", step, name, ranks, first)
            if session.config.on_save_error == "raise":
                raise SaveError(
                    f"saving {name} failed on ranks {ranks}: {first}", operation="save", key=path, step=step
                ) from error

    # ------------------------------------------------------------------------------------- load
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads model and optimizers in place, and gives the rest; every rank calls this.

        Raises:
            CheckpointNotFoundError: There is none of that name.
            RestoreError: None is intact.
        """
        path = str(self.broadcast(os.fspath(checkpoint_path)))
        engine = self._tiered_io.checkpointer
        session, started = engine.session, engine.session.clock.monotonic()
        before = session.asked.get("bytes.down", 0)
        dirpath, selector = engine.select(path)
        self._tiered_io.found_nothing = False
        reader = _Reader(self._shared, dirpath, selector)
        try:
            reader.choose()
        except OtherKindError:
            return self._load_full(path, weights_only)
        except CheckpointNotFoundError:
            if selector.kind == "name":
                return self._load_full(path, weights_only)
            if selector.kind == "best":
                raise
            self._tiered_io.found_nothing = True
            session.log.info("no checkpoint at %s", dirpath)
            return FreshStart(dirpath)
        rest = self._load_shards(reader, weights_only)
        opened = reader.opened
        assert opened is not None
        engine.restored = Restored(
            name=opened.name,
            content=opened.content,
            tier=reader.tier,
            path=session.open().tier.root,
            seconds=session.clock.monotonic() - started,
            bytes_read=session.asked.get("bytes.down", 0) - before,
            rejected=opened.rejected,
            newest_save_id=opened.newest_save_id,
        )
        return rest

    def _load_shards(self, reader: _Reader, weights_only: bool | None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        optimizers = self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else []
        trust = Trust.of(reader.settings.config, weights_only)
        planner = _Planner(self, reader, optimizers, trust, strict=module.strict_loading)
        # The planner puts in what to load, once it knows what the checkpoint holds.
        try:
            dcp.load({}, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            # DCP's exception is not one that Trainer handles.
            ranks, first = dcp.first_failure(error)
            if isinstance(first, TieredCheckpointError):
                raise first from error
            raise RestoreError(
                f"loading {reader.checkpoint_id} failed on ranks {ranks}: {first}",
                operation="load",
                key=reader.checkpoint_id,
            ) from error
        options = sharded_state.StateDictOptions(strict=module.strict_loading)
        sharded_state.set_model_state_dict(self._wrapped, planner.model, options=options)
        for optimizer, state in zip(optimizers, planner.optimizers, strict=True):
            sharded_state.set_optimizer_state_dict(self._wrapped, optimizer, state)
        rest: dict[str, Any] = put_back(planner.rest, planner.sharded)
        return rest

    def _load_full(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        trust = Trust.of(self._tiered_io.config, weights_only)

        def read(file: Path, found: Restored) -> Any:
            # What others wrote may be in torch's old format, which can't be mapped.
            mmap, where = found.content is not None, {"tier": found.tier, "key": found.name, "step": found.step}
            state = trust.read(file, found.name, where, map_location="cpu", mmap=mmap)
            self._local_file = file
            try:
                with read_already(file, state):
                    return super(TieredSharding, self).load_checkpoint(file)
            finally:
                self._local_file = None

        loaded: dict[str, Any] = self._tiered_io.checkpointer.load_by(path, read)
        return loaded

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As upstream."""
        # Where a full checkpoint lies on this node; it may be another place on each.
        if obj is not None and obj is self._local_file:
            return obj
        return super().broadcast(obj, src)  # type: ignore[safe-super]


class TieredFSDPStrategy(TieredSharding, FSDPStrategy):
    """FSDPStrategy whose checkpoints, sharded or full, go through the tiers."""

    _model_key = _MODEL_KEYS[1]

    @property
    def _saves_shards(self) -> bool:
        return self._state_dict_type == "sharded"


class TieredModelParallelStrategy(TieredSharding, ModelParallelStrategy):
    """ModelParallelStrategy (FSDP2, tensor parallel) whose checkpoints, sharded or full, go through the tiers."""

    @property
    def _saves_shards(self) -> bool:
        return self._save_distributed_checkpoint


class _OfStrategy:
    """A writer or reader of one checkpoint, through the session of a strategy's checkpoint IO. Used once."""

    _of_strategy: Shared

    @property
    def _shared(self) -> Shared:
        return self._of_strategy

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: which checkpoint is meant was said before."""


class _Writer(_OfStrategy, TieredStorageWriter):
    """Writes one checkpoint of a strategy."""

    def __init__(self, shared: Shared, located: ids.Located, *, durable: bool, wait: bool) -> None:
        super().__init__(shared.session.config, save_to_s3=durable, wait=wait, require_step=False)
        self._of_strategy = shared
        self._located = located


class _Reader(_OfStrategy, TieredStorageReader):
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


class _Planner(DefaultLoadPlanner):
    """Decides what to load when the checkpoint has been chosen: which model key, optimizers, and the rest."""

    def __init__(
        self, strategy: TieredSharding, reader: _Reader, optimizers: list[Optimizer], trust: Trust, *, strict: bool
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self._reader = reader
        self._mesh = getattr(strategy, "_device_mesh", None)
        self._trust = trust
        self.model = sharded_state.get_model_state_dict(strategy._wrapped)
        self.optimizers = [sharded_state.get_optimizer_state_dict(strategy._wrapped, each) for each in optimizers]
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
        key = next((key for key in _MODEL_KEYS if key in heads), None)
        missing = [f"optimizer_{i}" for i in range(len(self.optimizers)) if f"optimizer_{i}" not in heads]
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
        self.sharded = make_again(self.rest, self._mesh)
        state_dict[key] = self.model
        state_dict.update({f"optimizer_{i}": each for i, each in enumerate(self.optimizers)})
        state_dict.update({SHARDED: self.sharded} if self.sharded else {})
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _read_rest(self, small: Mapping[str, bytes]) -> dict[str, Any]:
        stem, _, ending = _REST.partition(".")
        data = next((d for n, d in small.items() if n.startswith(stem) and n.endswith(ending)), None)
        if data is None:
            raise RestoreError(
                f"there is no {_REST} beside the shards",
                operation="load",
                key=self._reader.checkpoint_id,
                hint="it was not saved by a strategy of Lightning's; load it by tiered_checkpoint_io.dcp",
            )
        where = {"key": self._reader.checkpoint_id}
        found: dict[str, Any] = self._trust.read(io.BytesIO(data), _REST, where, map_location="cpu")
        return found
