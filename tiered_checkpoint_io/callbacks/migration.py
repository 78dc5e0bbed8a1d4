"""Lets Lightning's own checkpoint callback and ours load each other's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

#: The key that our state has, and Lightning's has not.
WITHHELD = "withheld"
_STOCK, _OURS = "ModelCheckpoint", "TieredModelCheckpoint"


class PortableState(ModelCheckpoint):
    """A ModelCheckpoint whose state is that of Lightning's own class, so that a run may change over and back."""

    @property
    def state_key(self) -> str:
        """Names the state as Lightning's own callback with the same arguments does."""
        key = super().state_key
        return key.replace(_OURS, _STOCK, 1) if type(self).__qualname__ == _OURS else key

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Finds this callback's state under another key."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        states = checkpoint.get("callbacks") or {}
        others = {each.state_key for each in trainer.callbacks if each is not self}  # type: ignore[attr-defined]
        key = key_to_load(states, self, others)
        if key is not None and key != self.state_key:
            checkpoint["callbacks"] = {**states, self.state_key: states[key]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if WITHHELD not in state_dict:
            # State of Lightning's own callback counts, wherever it is. Files elsewhere are never deleted.
            state_dict = {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)


def key_to_load(states: Mapping[Any, Any], callback: ModelCheckpoint, taken: Collection[str]) -> str | None:
    """Finds the key of a callback's state among the states of a checkpoint; None if there is none.

    The key is its own; else the key of the same arguments in another class; else the only key of Lightning's own class
    with the same ``monitor`` and ``mode``: a run that migrates may change its triggers too. ``taken`` are the keys of
    the trainer's other callbacks.
    """
    key = callback.state_key
    _, brace, arguments = key.partition("{")
    same = _STOCK + repr({"monitor": callback.monitor, "mode": callback.mode}).removesuffix("}") + ", "
    # Before Lightning 1.5, keys were classes.
    free = [each for each in states if isinstance(each, str) and each not in taken]
    alike = [each for each in free if each.startswith(same) and WITHHELD not in states[each]]
    candidates = [key, _STOCK + brace + arguments, *(alike if len(alike) == 1 else [])]
    return next((each for each in candidates if each in free), None)
