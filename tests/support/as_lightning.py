"""One training by Lightning's ModelCheckpoint and by TieredModelCheckpoint, and what each of them leaves.

A story is a function of a side: it trains, and returns what it saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.supporting import build
from support.training import durable
from torch.utils.data import DataLoader

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

INSTALLED = tuple(int(part) for part in lightning.__version__.split(".")[:2])


class Trouble(Exception):
    """Error that a story's model or callback raises."""


class Tiny(LightningModule):
    """``score`` has one of ``values`` after each step, ``val/score`` after each validation."""

    def __init__(self, values: tuple[float, ...] = (5, 3, 4, 1, 2, 6), loader: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2, 1)
        self.values = values
        self.loader = loader
        self.validations = 0

    def training_step(self, batch, _):
        value = self.values[self.global_step % len(self.values)]
        self.log("score", torch.tensor(float(value)))
        self.log("score_2", torch.tensor(2.0 * value))
        return self.layer(batch * 0 + self.global_step + 1).mean()

    def validation_step(self, *_):
        pass

    def test_step(self, *_):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("val/score", torch.tensor(float(self.values[self.validations % len(self.values)])))
            self.validations += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 2)) if self.loader is None else self.loader

    def val_dataloader(self):
        return DataLoader(torch.zeros(2, 2))

    test_dataloader = val_dataloader


def number(value: Any) -> str | None:
    """Returns a score as text, so that NaN equals itself."""
    return None if value is None else repr(round(float(value), 4))


class Side:
    """Trainings by one of the two kinds of callback; all of one side share one durable tier."""

    kind: type[ModelCheckpoint] = ModelCheckpoint

    def __init__(self, root: Path, memory_dir: str) -> None:
        self.root = root
        self.memory_dir = memory_dir
        self.dirpath = str(root / "run")
        #: Each path that ``Trainer.save_checkpoint`` was called with.
        self.saves: list[str] = []

    def callback(self, *, attributes: dict[str, Any] | None = None, **arguments: Any) -> Any:
        """Returns a callback; ``attributes`` are those of a class derived for it."""
        kind = type(self.kind.__name__, (self.kind,), attributes) if attributes else self.kind
        return kind(**{"dirpath": self.dirpath, **arguments})

    def plugins(self) -> list[Any]:
        return []

    def trainer(self, *callbacks: Any, **options: Any) -> Trainer:
        trainer = Trainer(
            **{
                "plugins": self.plugins(),
                "callbacks": list(callbacks),
                "max_epochs": 3,
                "limit_train_batches": 2,
                "limit_val_batches": 0,
                "num_sanity_val_steps": 0,
                "logger": False,
                "accelerator": "cpu",
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": str(self.root),
                **options,
            }
        )
        save = trainer.save_checkpoint

        def counting(filepath, *arguments, **named):
            self.saves.append(self.rel(filepath))
            save(filepath, *arguments, **named)

        trainer.save_checkpoint = counting
        return trainer

    def fit(self, *callbacks: Any, model: Any = None, ckpt_path: Any = None, **options: Any) -> Trainer:
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(model or Tiny(), ckpt_path=ckpt_path)
        return trainer

    def train(self, *, fit: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        """Trains once by one callback, and returns the results."""
        callback = self.callback(**arguments)
        self.fit(callback, **(fit or {}))
        return self.seen(callback)

    def rel(self, path: Any) -> str:
        return str(path).removeprefix(self.dirpath + "/")

    def path(self, name: str) -> str:
        return f"{self.dirpath}/{name}"

    def names(self) -> list[str]:
        folder = Path(self.dirpath)
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def load(self, *names: str) -> list[Any]:
        return [torch.load(self.path(name), weights_only=False) for name in names]

    def files(self) -> dict[str, Any]:
        """Returns each checkpoint's epoch, step, and a number that represents its weights."""
        names = self.names()
        return {
            name: (state["epoch"], state["global_step"], number(state["state_dict"]["layer.weight"].sum()))
            for name, state in zip(names, self.load(*names), strict=True)
        }

    def state(self, name: str) -> dict[str, Any]:
        """Returns the state of the one ModelCheckpoint that a checkpoint holds."""
        [state] = [value for key, value in self.load(name)[0]["callbacks"].items() if "ModelCheckpoint" in key]
        return state

    def of_callback(self, callback: ModelCheckpoint) -> dict[str, Any]:
        return {
            "best": self.rel(callback.best_model_path),
            "best score": number(callback.best_model_score),
            "current score": number(callback.current_score),
            "best k": {self.rel(path): number(score) for path, score in callback.best_k_models.items()},
            "kth": (self.rel(callback.kth_best_model_path), number(callback.kth_value)),
            "last": self.rel(callback.last_model_path),
        }

    def seen(self, callback: ModelCheckpoint) -> dict[str, Any]:
        return {"files": self.files(), **self.of_callback(callback)}


class Ours(Side):
    kind = TieredModelCheckpoint

    def io(self) -> TieredCheckpointIO:
        # Additions of this package, such as the upload at the end of fit, are off.
        return build(
            TieredCheckpointIO,
            dirpath=self.dirpath,
            memory_dir=self.memory_dir,
            drain="thread",
            wait_timeout_s=60,
            save_on_train_end=False,
            preflight="off",
        )

    def plugins(self) -> list[Any]:
        return [AsyncCheckpointIO(self.io())]

    def names(self) -> list[str]:
        return durable(self.dirpath)

    def load(self, *names: str) -> list[Any]:
        io = self.io()
        try:
            return [io.load_checkpoint(name) for name in names]
        finally:
            io.teardown()


class Failing(Callback):
    """Raises in one hook, once this many steps are done."""

    def __init__(self, hook: str, error: BaseException, steps: int) -> None:
        def fail(trainer, *_, **__):
            if trainer.global_step >= steps and not trainer.sanity_checking:
                raise error

        setattr(self, hook, fail)


def newest(side: Side, **more: Any) -> Any:
    """Returns a callback that saves each step and keeps the last two."""
    return side.callback(**{"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 1, **more})


def resume(side: Side, first: Any, second: Any, ckpt_path: Any, *, to: int = 5, **fit: Any) -> tuple[int, Any]:
    """Trains three steps by one callback, and up to five by another that resumes."""
    side.fit(first, max_steps=3, max_epochs=-1, limit_train_batches=4)
    fit = {"max_steps": to, "max_epochs": -1, "limit_train_batches": 4, **fit}
    trainer = side.fit(second, ckpt_path=ckpt_path(side, first), **fit)
    return trainer.global_step, side.seen(second)
