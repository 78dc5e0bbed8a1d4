"""Waits for overlapped captures before anything may change their tensors: see :mod:`engine.save.overlap`.

Lightning's hooks come in this order: a batch ends, and ModelCheckpoint saves; the next one begins; forward, backward;
``on_before_optimizer_step``; the update. Only a save between two batches may leave its capture to the background.
Torch's own hook sees the steps that Lightning does not know of.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.adapters.optimizers import tensors_of_optimizers
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.save.facts import say_eager
from tiered_checkpoint_io.engine.save.overlap import Overlap, Spans, ends_of, parts_here, spans_of
from tiered_checkpoint_io.engine.save.saver import FullSaver
from tiered_checkpoint_io.errors import SaveError


class OverlappedCapture(Callback):
    """The first callback of a trainer: other callbacks' work in the same hook comes after the wait."""

    def __init__(self, trainer: Trainer, io: TieredCheckpointIO, saver: FullSaver | CoordinatedSaver) -> None:
        self._trainer = trainer
        self._saver = saver
        self._session = io.checkpointer.session
        self._overlap = Overlap(self._session, self._tensors)
        self._between_batches = False
        self._handle: Any = None
        self._validation: Any = trainer.fit_loop.epoch_loop.val_loop

    @classmethod
    def join(cls, trainer: Trainer, io: TieredCheckpointIO) -> OverlappedCapture | None:
        """Makes one the trainer's first callback; None, with a line in the log, if its saves are eager."""
        session, strategy = io.checkpointer.session, trainer.strategy
        sharded = strategy.may_overlap() if hasattr(strategy, "may_overlap") else None
        if sharded is None and not trainer.is_global_zero:
            return None
        # Other strategies change parameters themselves: FSDPStrategy exchanges their memory in each forward.
        if sharded is None and type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
            say_eager(session, f"{type(strategy).__name__} is not known to leave parameters to the optimizers")
            return None
        if strategy.root_device.type not in ("cpu", "cuda"):
            say_eager(session, f"addresses on {strategy.root_device.type} do not tell what memory tensors share")
            return None
        callback = cls(trainer, io, sharded or io.checkpointer.saver)
        # Not in place: Lightning goes through this list just now.
        trainer.callbacks = [callback, *trainer.callbacks]  # type: ignore[attr-defined]
        callback._saver.overlap = callback._overlap
        callback._handle = register_optimizer_step_pre_hook(callback._before_step)
        callback._hold_validation()
        return callback

    def leave(self, trainer: Trainer) -> None:
        """Leaves the trainer, and waits; raises as :meth:`Overlap.wait`."""
        self._saver.overlap = None
        self._handle.remove()
        vars(self._validation).pop("run", None)
        trainer.callbacks = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        self._overlap.wait()

    # -------------------------------------------------------------------------------- the waits
    def _hold_validation(self) -> None:
        # Its first hook is the module's on_validation_model_eval, in which some optimizers put other weights in place.
        run = self._validation.run

        def run_later() -> Any:
            self._wait()
            return run()

        self._validation.run = run_later

    def _wait(self, *_: Any, **__: Any) -> None:
        self._between_batches = False
        self._overlap.wait()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first of these is the optimizer.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # Lightning's own runs forward and backward, and then on_before_optimizer_step.
        wrapped = closure.func if isinstance(closure, functools.partial) else None
        # Torch's own change no parameter before they call a closure; SAM, stepped by hand, and schedulefree's do.
        is_by_hand = not self._trainer.lightning_module.automatic_optimization
        is_other = getattr(wrapped, "__name__", "") != "_wrap_closure"
        if is_other or is_by_hand or type(optimizer).__name__.endswith("Closure"):
            self._wait()

    # At the end of an epoch weights are exchanged, also by callbacks that come after one that saves.
    on_before_optimizer_step = on_train_epoch_start = on_train_epoch_end = _wait
    on_validation_start = on_sanity_check_start = _wait
    on_test_start = on_predict_start = on_train_end = on_fit_end = teardown = _wait

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Waits; the user sees the error that has ended the training."""
        try:
            self._wait()
        except SaveError as error:
            self._session.log.error("%s", error)

    def on_train_batch_start(self, *_: Any) -> None:
        """Makes saves eager from here on: the module's own code runs, and its optimizers."""
        self._between_batches = False

    def on_train_batch_end(self, *_: Any) -> None:
        """Lets later saves overlap training."""
        self._between_batches = True

    # ------------------------------------------------------------------------------- the tensors
    def _tensors(self) -> list[torch.Tensor]:
        """Returns tensors that only an optimizer's step changes before :meth:`_wait`; nothing for an eager save."""
        trainer = self._trainer
        state = trainer.state
        is_training = state.stage is RunningStage.TRAINING and state.status is TrainerStatus.RUNNING
        if self._session.is_preempted:
            # No training follows that it could overlap, and all cores are free for it.
            return []
        if not (self._between_batches and is_training):
            say_eager(self._session, "it is not saved between two batches")
            return []
        held = tensors_of_optimizers(trainer.optimizers)
        if any(map(attrgetter("_post_accumulate_grad_hooks"), held)):
            say_eager(self._session, "a parameter's optimizer steps during the backward pass")
            return []
        changed = [each for each in parts_here(_changed_by_forward(trainer.lightning_module)) if each.data_ptr()]
        if not changed:
            return held
        # Tensors that share memory with these may change in the forward pass.
        here = parts_here(held)
        begins = np.array(list(map(torch.Tensor.data_ptr, here)), np.int64)
        shared = Spans(*spans_of(changed)).meet(begins, ends_of(here, begins)[0])
        return [held[number] for number in np.flatnonzero(~shared)] if shared.any() else held


def _changed_by_forward(module: torch.nn.Module) -> list[torch.Tensor]:
    """Returns buffers, faster than ``module.buffers()``, and the weights of embeddings that keep to a norm."""
    modules = [module]
    for each in modules:
        modules.extend(child for child in each._modules.values() if child is not None)
    buffers = [buffer for each in modules for buffer in each._buffers.values() if buffer is not None]
    normed = [each for each in modules if each.__dict__.get("max_norm") is not None]
    return buffers + [weight for each in normed for weight in each._parameters.values() if weight is not None]
