"""Lightning's sharded strategies over both tiers: FSDP, and ModelParallel (FSDP2, tensor parallel)."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.adapters import dcp
from tiered_checkpoint_io.adapters.calls import as_save_error, first_failure, save_planner
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import Save, TieredStorageWriter
from tiered_checkpoint_io.adapters.lightning import (
    AsyncCheckpointIO,
    FreshStart,
    TieredCheckpointIO,
    check_saved_by_trainer,
    read_storage_options,
    require_tiered_io,
)
from tiered_checkpoint_io.adapters.optimizers import by_name, optimizer_state, set_optimizer_state, take_full
from tiered_checkpoint_io.engine.checkpointer import nothing_to_resume
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.restore import Restored
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.save.overlap import ChangedError, Overlapped
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DrainError,
    RestoreError,
    SaveError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import of_step
from tiered_checkpoint_io.model import ids

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    _Base = Strategy
else:
    _Base = object


#: Names of the model in a sharded checkpoint of Lightning's strategies: ModelParallel, and FSDP.
MODEL_KEYS = ("state_dict", "model")


class StrategyWriter(TieredStorageWriter):
    """Writes one checkpoint of a strategy."""

    def __init__(
        self,
        saver: CoordinatedSaver,
        located: ids.Located,
        *,
        durable: bool,
        wait: bool,
        facts: dict[str, Any],
        rest: bytes | None,
        failed: Exception | None,
        seals_in_background: bool = False,
        overlapped: Overlapped | None = None,
    ) -> None:
        """Takes the small file, on rank 0, as ``rest``."""
        super().__init__(saver.session.config, save_to_s3=durable, wait=wait, require_step=False)
        self._own_saver = saver
        self._save = self._of_thread.save = Save(self.settings, located)
        self.extra = (ids.REST, rest) if rest is not None else None
        self.facts, self.failed = facts, failed
        self.seals_in_background, self.overlapped = seals_in_background, overlapped


class StrategyReader(TieredStorageReader):
    """Reads the checkpoint that a strategy was asked for."""

    def __init__(self, saver: CoordinatedSaver, dirpath: str, selector: Selector) -> None:
        super().__init__(saver.session.config)
        self._own_saver = saver
        self.settings = self.settings.at(dirpath)
        self.selector = selector

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: the checkpoint was named before."""


class StrategyPlanner(DefaultLoadPlanner):
    """Completes the state to load, once the checkpoint has been chosen: the model's key, optimizers, and the rest."""

    def __init__(
        self,
        module: torch.nn.Module,
        reader: StrategyReader,
        optimizers: list[Optimizer],
        trust: Trust,
        *,
        strict: bool,
    ) -> None:
        super().__init__(allow_partial_load=not strict)
        self._reader = reader
        self._trust = trust
        self._live = module, optimizers
        self.model: dict[str, Any] = {}
        #: The optimizers' states, and the part of each that is loaded.
        self._whole: list[Any] = []
        self.optimizers: list[Any] = []
        #: The parameters of each optimizer without a state in the checkpoint: it had not changed them yet.
        self.unchanged: list[list[str]] = [[] for _ in optimizers]
        self.rest: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Completes the state to load."""
        if not self.model:
            # Not before a checkpoint is found: torch has an optimizer without a state make a step.
            module, optimizers = self._live
            self.model = sharded_state.get_model_state_dict(module)
            self._whole = [sharded_state.get_optimizer_state_dict(module, each) for each in optimizers]
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
        self._leave_out_unchanged(metadata)
        state_dict[key] = self.model
        state_dict.update({f"optimizer_{i}": each for i, each in enumerate(self.optimizers)})
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _leave_out_unchanged(self, metadata: Metadata) -> None:
        # An optimizer makes a parameter's state at the first step that has a gradient for it; here, DCP has made all.
        # Each time again: if this checkpoint is damaged, the next one may hold others.
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


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor | ShardedTensor):
            raise ConfigError(
                "the state of a callback or loop holds a sharded tensor",
                operation="save",
                hint="let on_save_checkpoint gather it: only those of the model and the optimizers are saved as shards",
            )
        return NotImplemented


def _pickled_rest(rest: dict[str, Any]) -> bytes:
    """Returns the file of ``torch.save`` for all that Lightning saves beside the model and the optimizers."""
    file, module = io.BytesIO(), SimpleNamespace(Pickler=_Pickler, __name__="pickle")
    torch.save(rest, file, pickle_module=module)
    return file.getvalue()


def _is_alone() -> bool:
    return dist.is_initialized() and dist.get_world_size() == 1


class TieredSharding(_Base):
    """Saves and loads sharded tensors that refer to the live parameters; comes before Lightning's own class.

    Tensors are not gathered or copied beforehand. Full checkpoints, made by any strategy, load as well.
    """

    _model_key = MODEL_KEYS[0]
    _saver: CoordinatedSaver | None = None
    #: The last save that was left to the background.
    _saving: Future[None] | None = None
    #: The ranks that save, for saves during training: their messages must not mix with the training's.
    _save_group: Any = None

    @property
    def _saves_shards(self) -> bool:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- life
    def setup(self, trainer: Trainer) -> None:
        """Does upstream's setup; raises ConfigError if the trainer's checkpoint IO is not ours."""
        self._tiered_io  # noqa: B018 - raises
        super().setup(trainer)

    def teardown(self) -> None:
        """Does upstream's teardown, and the checkpoint IO's, which upstream forgets."""
        with contextlib.ExitStack() as ending:
            ending.callback(super().teardown)
            ending.callback(self.checkpoint_io.teardown)
            if self._saver is not None:
                ending.callback(self._saver.close)
            self._show()

    @property
    def _tiered_io(self) -> TieredCheckpointIO:
        return require_tiered_io(self, type(self).__name__)

    @property
    def _saver_here(self) -> CoordinatedSaver:
        session = self._tiered_io.checkpointer.session
        if self._saver is None or self._saver.session is not session:
            # In a forked process, the session is another one.
            self._saver = CoordinatedSaver(session, one_series=True)
        return self._saver

    # ------------------------------------------------------------------------------------ state
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns sharded tensors that refer to the model's parameters, or as upstream."""
        if not self._saves_shards:
            full: dict[str, Any] = super().lightning_module_state_dict()
            return full
        return sharded_state.get_model_state_dict(self._wrapped)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns sharded tensors that refer to an optimizer's state, or as upstream."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        full = None if self._saves_shards else super().optimizer_state
        return optimizer_state(self._wrapped, optimizer, full)

    @property
    def _wrapped(self) -> torch.nn.Module:
        assert self.model is not None
        return self.model

    # ------------------------------------------------------------------------------------- save
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves to both tiers, or the tiers in ``storage_options``; every rank calls this."""
        # Rank 0 says for all whether the last save has ended: all ranks save together, or not at all.
        path, late = self.broadcast((os.fspath(filepath), self._late()))
        if not self._saves_shards:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        tiers, metric, may_wait = read_storage_options(storage_options)
        session = self._tiered_io.checkpointer.session
        started = session.clock.monotonic()
        name, step = ids.validate_new_name(ids.name_in(session.dirpath, path)), checkpoint.get("global_step", -1)
        if late is not None:
            session.failed(name, step, late, shared=True)
            return
        self._show()
        saver, is_async = self._saver_here, isinstance(self.checkpoint_io, AsyncCheckpointIO)
        state, begun, pickled, failed = self._take(checkpoint, saver, is_async=is_async)
        resumable, is_durable = self._tiered_io.is_resumable(checkpoint, path), "durable" in tiers
        # Training waits for this method, so an overlapped save makes its writer in the background.
        writer = functools.partial(
            StrategyWriter,
            saver,
            ids.Located(session.dirpath, name, step),
            durable=is_durable,
            wait=may_wait and is_durable and not is_async,
            facts={"epoch": checkpoint.get("epoch", -1), "metric": metric, "resumable": resumable},
            rest=pickled,
            failed=failed,
        )
        if begun is None:
            self._save(state, writer(seals_in_background=is_async))
            return
        state, overlapped = begun
        overlapped.stall_s = stall_s = session.clock.monotonic() - started
        # Callers look here for the saved files, as soon as this returns.
        more = {"queued": is_durable, "overlapped": True, "resumable": resumable}
        overlapped.made = SaveReport(name, step, "", overlapped.size, stall_s, frozenset(tiers), **more)
        session.last_save = overlapped.made
        try:
            self._saving = session.background.run(name, lambda: self._save_beside(state, overlapped, writer))
        except BaseException:
            overlapped.copied.set()
            raise

    def _take(
        self, checkpoint: dict[str, Any], saver: CoordinatedSaver, *, is_async: bool
    ) -> tuple[dict[str, Any], tuple[Any, Overlapped] | None, bytes | None, Exception | None]:
        """Returns the state to save, its overlapped capture if all ranks begin one, rank 0's rest, and an error.

        The other ranks get this rank's error when they save: otherwise they would wait for this rank.
        """
        overlap = saver.overlap if is_async else None
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        state: dict[str, Any] = {self._model_key: checkpoint["state_dict"]}
        state.update({f"optimizer_{i}": each for i, each in enumerate(checkpoint.get("optimizer_states", []))})
        begun = pickled = failed = None
        try:
            pickled = _pickled_rest(rest) if self.is_global_zero else None
            begun = overlap.begin_state(state) if overlap is not None else None
        except Exception as error:
            failed = as_save_error(error)
        if self._save_group is not None and is_async:
            # Else one rank would wait for the parts of others, which are sealed when the save has ended.
            agreed = False
            try:
                agreed = self._all(begun is not None)
            finally:
                if begun is not None and overlap is not None and not agreed:
                    overlap.forgo()
                    begun = None
        return state, begun, pickled, failed

    def _all(self, decision: bool) -> bool:
        if _is_alone():
            return decision
        refused = torch.tensor(int(not decision), device="cpu")
        dist.all_reduce(refused, group=self._save_group)
        return not refused

    def _save(self, state: dict[str, Any], writer: StrategyWriter) -> None:
        """Saves with all ranks; raises as :meth:`save_checkpoint`."""
        session, located = writer.session, writer.located
        try:
            planner = save_planner("strategy")
            state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=self._save_group)
            writer.saver.seal_in_background()
        except CheckpointException as error:
            ranks, first = first_failure(error)
            text = f"saving {located.name} failed on ranks {ranks}: {first}"
            if writer.overlapped is not None:
                # On all ranks alike.
                session.background.lost.update([located.name] if writer.save_to_s3 else [])
                if isinstance(first, ChangedError):
                    writer.saver.stop_overlapping()
            if self.is_global_zero:
                session.log.error("%s%s", of_step(located.step), text)
            has_raised = writer.overlapped is not None and writer.overlapped.is_late
            if session.config.on_save_error == "raise" and not has_raised:
                path = ids.join_url(located.dirpath, located.name)
                raise SaveError(text, operation="save", key=path, step=located.step) from error

    def _save_beside(self, state: Any, overlapped: Overlapped, writer: Callable[..., StrategyWriter]) -> None:
        try:
            overlapped.let_caller_return()
            with torch.no_grad():
                self._save(state, writer(overlapped=overlapped))
        finally:
            overlapped.copied.set()

    def _late(self) -> DrainError | None:
        """Waits for the last save in the background; returns the error if that takes too long."""
        try:
            if self._saving is not None:
                self._tiered_io.checkpointer.session.background.wait()
        except DrainError as error:
            return error
        return None

    def _show(self) -> None:
        """Waits for the last save in the background, and raises its failure."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._tiered_io.checkpointer.session.background.wait()
            saving.result(0)

    # ------------------------------------------------------------------------------------- load
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads model and optimizers in place, and returns the rest; every rank calls this."""
        path = str(self.broadcast(os.fspath(checkpoint_path)))
        engine = self._tiered_io.checkpointer
        dirpath, selector = engine.select(path)
        self._tiered_io.found_nothing = False
        reader = StrategyReader(self._saver_here, dirpath, selector)
        try:
            rest = self._load_shards(reader, weights_only)
        except RestoreError as error:
            if error.reason != "other_kind":
                raise
            return self._load_full(path, weights_only, error.rejected)
        except CheckpointNotFoundError:
            if selector.kind == "name":
                return self._load_full(path, weights_only)
            self._tiered_io.found_nothing = True
            engine.session.log.info("%s", nothing_to_resume(selector, dirpath))
            return FreshStart(dirpath)
        engine.restored = reader.opened
        return rest

    def _load_shards(self, reader: StrategyReader, weights_only: bool | None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        optimizers = self._trained_optimizers
        trust = Trust.of(reader.settings.config, weights_only)
        planner = StrategyPlanner(self._wrapped, reader, optimizers, trust, strict=module.strict_loading)
        # The planner adds the targets, once it knows the checkpoint's content.
        try:
            dcp.load({}, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            # DCP's exception is not one that Trainer handles.
            ranks, first = first_failure(error)
            if isinstance(first, TieredCheckpointError):
                raise first from error
            raise RestoreError(
                f"loading {reader.checkpoint_id} failed on ranks {ranks}: {first}",
                operation="load",
                key=reader.checkpoint_id,
            ) from error
        options = sharded_state.StateDictOptions(strict=module.strict_loading)
        sharded_state.set_model_state_dict(self._wrapped, planner.model, options=options)
        for optimizer, state, unchanged in zip(optimizers, planner.optimizers, planner.unchanged, strict=True):
            set_optimizer_state(self._wrapped, optimizer, state, unchanged)
        return planner.rest

    @property
    def _trained_optimizers(self) -> list[Optimizer]:
        module = self.lightning_module
        assert module is not None
        return self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else []

    def _load_full(
        self, path: str, weights_only: bool | None, rejected: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        trust = Trust.of(self._tiered_io.config, weights_only)
        module = self.lightning_module
        assert module is not None

        def read(found: Restored) -> Any:
            state = found.load(trust, map_location="cpu")
            check_saved_by_trainer(state, found.name)
            optimizers, states = self._trained_optimizers, state.get("optimizer_states", ())
            if optimizers and len(states) == len(optimizers):
                pairs = zip(optimizers, states, strict=True)
                state["optimizer_states"] = [by_name(self._wrapped, *each) for each in pairs]
            take_full(self._wrapped, optimizers, state, strict=module.strict_loading)
            return state

        loaded: dict[str, Any] = self._tiered_io.checkpointer.load_by(path, read, rejected=rejected)
        return loaded

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Does upstream's call, except for a single rank."""
        return obj if _is_alone() else super().broadcast(obj, src)  # type: ignore[safe-super]

    def barrier(self, *args: Any, **options: Any) -> None:
        """Does upstream's call, except for a single rank."""
        if not _is_alone():
            super().barrier(*args, **options)  # type: ignore[safe-super]


class TieredFSDPStrategy(TieredSharding, FSDPStrategy):
    """FSDPStrategy whose checkpoints, sharded or full, go through the tiers."""

    _model_key = MODEL_KEYS[1]

    @property
    def _saves_shards(self) -> bool:
        return self._state_dict_type == "sharded"


class TieredModelParallelStrategy(TieredSharding, ModelParallelStrategy):
    """ModelParallelStrategy (FSDP2, tensor parallel) whose checkpoints, sharded or full, go through the tiers."""

    @property
    def _saves_shards(self) -> bool:
        return self._save_distributed_checkpoint

    def may_overlap(self) -> CoordinatedSaver | None:
        """Returns the saver whose captures may overlap training; None if rank 0 saves; every rank calls this."""
        if not self._saves_shards:
            return None
        self._save_group = self._save_group or dist.new_group(backend="gloo")
        return self._saver_here
