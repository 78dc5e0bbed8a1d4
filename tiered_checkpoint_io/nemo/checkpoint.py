"""The checkpoint callback that replaces NeMo's NeMoModelCheckpoint."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.trainer import failing_together, on_rank_0
from tiered_checkpoint_io.errors import SaveError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.connector import known_names, step_of
from tiered_checkpoint_io.nemo.io import NeMoCheckpointIO
from tiered_checkpoint_io.nemo.s3_utils import upload_file

_STEP_OR_EPOCH = re.compile(r"(?:step|epoch)[=_-](\d+)")


class TieredNeMoCheckpoint(TieredModelCheckpoint):
    """A TieredModelCheckpoint with the additions of NeMo's callback.

    - ``-last`` names with step and metric; each replaces the one before.
    - A checkpoint at the end of training, and ``.nemo`` files on the durable tier.
    - It and NeMo's own callback load each other's state.
    """

    def __init__(
        self,
        dirpath: Any = None,
        *,
        always_save_nemo: bool = False,
        save_nemo_on_train_end: bool = True,
        save_best_model: bool = False,
        prefix: str | None = None,
        postfix: str = ".nemo",
        **model_checkpoint_args: Any,
    ) -> None:
        """Takes TieredModelCheckpoint's arguments, and NeMo's.

        Args:
            dirpath: The IO's by default; otherwise a folder below it.
            always_save_nemo: A ``.nemo`` file with each durable checkpoint, or with each new best one.
            save_nemo_on_train_end: A ``.nemo`` file at the end of training.
            save_best_model: ``.nemo`` files hold the best checkpoint, not the latest state.
            prefix: The ``.nemo`` file's name, without its extension.
            postfix: Its extension.
            model_checkpoint_args: Anything that TieredModelCheckpoint takes.
        """
        super().__init__(dirpath, **model_checkpoint_args)
        self.always_save_nemo = always_save_nemo
        self.save_nemo_on_train_end = save_nemo_on_train_end
        self.save_best_model = save_best_model
        self.prefix = prefix or "default"
        self.postfix = postfix
        if self.filename is not None:
            self.CHECKPOINT_NAME_LAST = f"{self.filename}-last"

    @property
    def state_key(self) -> str:
        """Names the state as NeMo's own callback does, so that each loads the other's."""
        return f"NeMo{super().state_key}"

    # ------------------------------------------------------------------------------------ hooks
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.save_last and self._engine.restored is not None:
            # One "last" of earlier runs stays until the next is good; the others go with it.
            names = on_rank_0(trainer, self._last_checkpoints)
            self.last_model_path = names[-1] if names else ""
            self._withheld = [*dict.fromkeys([*names[:-1], *self._withheld])]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if isinstance(self._io, NeMoCheckpointIO):
            self._io.maybe_finalize_save_checkpoint()

    def _save_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            # Most saves come from validation, which need not have run at the last step.
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        super()._save_end(trainer, module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.save_best_model:
            if self.best_model_path:
                self._load_best(trainer)
            else:
                rank_zero_warn("there is no best checkpoint; the latest model is exported in its place")
        if self.save_nemo_on_train_end:
            self._export(trainer, pl_module)

    def _load_best(self, trainer: Trainer) -> None:
        """Puts only the best checkpoint's weights into the module, for the export."""
        connector: Any = trainer._checkpoint_connector
        engine, ckpt_path, restored = self._engine, connector._ckpt_path, self._engine.restored
        assert self._io is not None
        self._io.holds_other_weights = True
        try:
            connector.resume_start(self.best_model_path)
            connector.restore_model()
            # Else Lightning says that all states are restored.
            connector._ckpt_path = None
            connector.resume_end()
        finally:
            connector._ckpt_path, engine.restored = ckpt_path, restored
        engine.session.log.info(
            "for the export, the model now holds the weights of %s; the training's checkpoints stay as they are",
            self.best_model_path,
        )

    # ------------------------------------------------------------------------------------- saves
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        before = self._durable_save
        super()._save_checkpoint(trainer, filepath)
        if self.always_save_nemo and self._durable_save != before:
            if self.save_best_model and filepath != self.best_model_path:
                return
            self._export(trainer, trainer.lightning_module)

    def _last_checkpoints(self) -> list[str]:
        """Lists all "last" checkpoints, the newest last: a crash may have left two, and NeMo's have no manifest."""
        engine = self._engine
        pattern = re.compile(re.sub(r"\\\{.*?\\\}", ".*", re.escape(self.CHECKPOINT_NAME_LAST)) + r"\.ckpt\Z")
        names = known_names(engine.session, 'could not look for the "last" checkpoints of earlier runs: %s')
        paths = {ids.join_url(engine.dirpath, name) for name in names} | {self.last_model_path}
        paths |= {engine.restored.url} if engine.restored is not None else set()
        return sorted((path for path in paths if pattern.match(path.removeprefix(f"{self.dirpath}/"))), key=_progress)

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the model's ``.nemo`` file to the durable tier, atomically; all ranks raise the same error."""
        save_to = getattr(pl_module, "save_to", None)
        if not callable(save_to):
            rank_zero_warn(f"{type(pl_module).__name__} does not implement save_to(): there will be no .nemo file")
            return
        path = ids.join_url(str(self.dirpath), self.prefix + self.postfix)
        with contextlib.ExitStack() as held:
            with failing_together(trainer), _as_export_error(trainer, path):
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="tiered-nemo-"))
                file = os.path.join(folder, os.path.basename(path))
            # All ranks have got here: a model with parts on several ranks gathers them now.
            with failing_together(trainer), _as_export_error(trainer, path):
                save_to(save_path=file)
                if trainer.is_global_zero:
                    upload_file(self._engine.session.durable(), ids.name_in(self._engine.dirpath, path), file)
        if trainer.is_global_zero:
            self._engine.session.log.info("Step %d: exported %s", trainer.global_step, path)


@contextlib.contextmanager
def _as_export_error(trainer: Trainer, path: str) -> Iterator[None]:
    try:
        yield
    except TieredCheckpointError:
        raise
    except Exception as error:
        text, where = f"the model could not be exported: {type(error).__name__}: {error}", trainer.global_rank
        raise SaveError(text, operation="export", key=path, step=trainer.global_step, rank=where) from error


def _progress(path: str) -> tuple[int, list[int]]:
    return step_of(path), [int(number) for number in _STEP_OR_EPOCH.findall(path)]
