"""One training by Lightning's ModelCheckpoint and by TieredModelCheckpoint, and what each of them leaves.

A story is a function of a side: it trains, and returns what it saw. A topic is a list of such stories, each named
like its row of docs/lightning.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.supporting import build
from support.training import durable
from torch.utils.data import DataLoader

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"
INSTALLED = tuple(int(part) for part in lightning.__version__.split(".")[:2])
#: Why a story needs a release of Lightning that is newer than the oldest one supported.
NEWER = {
    (2, 6): "save_on_exception, the last checkpoint at the end of training, the wait for a validation, and the rule"
    " for manual optimization came with Lightning 2.6; before, a batch counts as done only after it was saved",
}


class Trouble(Exception):
    """What a story's model or callback raises."""


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
    """A score as text, so that NaN equals itself."""
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

    @property
    def is_ours(self) -> bool:
        return self.kind is TieredModelCheckpoint

    def callback(self, *, attributes: dict[str, Any] | None = None, **arguments: Any) -> Any:
        """A callback; ``attributes`` are those of a class derived for it."""
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
        """What one training by one callback leaves."""
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
        """Each checkpoint's epoch, step, and a number that stands for its weights."""
        names = self.names()
        return {
            name: (state["epoch"], state["global_step"], number(state["state_dict"]["layer.weight"].sum()))
            for name, state in zip(names, self.load(*names), strict=True)
        }

    def state(self, name: str) -> dict[str, Any]:
        """The state of the one ModelCheckpoint that a checkpoint holds."""
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
        # What only this package does, such as the upload at the end of fit, is off.
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


Story = Callable[[Side], Any]


class Seen(NamedTuple):
    """What the two sides left, or what they are expected to leave."""

    lightning: Any
    here: Any


class Case(NamedTuple):
    row: str
    story: Story
    since: tuple[int, int]
    #: None where both sides are to leave the same.
    differs: Seen | None

    def __str__(self) -> str:
        return self.row

    def run(self, tmp_path: Path, memory_dir: str) -> tuple[Seen, Seen]:
        """What both sides left, and what is expected of them."""
        if self.since > INSTALLED:
            pytest.skip(NEWER[self.since])
        seen = Seen(
            self.story(Side(tmp_path / "lightning", memory_dir)), self.story(Ours(tmp_path / "ours", memory_dir))
        )
        return seen, self.differs or Seen(seen.lightning, seen.lightning)


class Topic:
    """A section of the document."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def same(self, row: str, *, since: tuple[int, int] = (2, 4)) -> Callable[[Story], Story]:
        return self._add(row, since, None)

    def different(
        self, row: str, *, lightning: Any, here: Any, since: tuple[int, int] = (2, 4)
    ) -> Callable[[Story], Story]:
        return self._add(row, since, Seen(lightning, here))

    def _add(self, row: str, since: tuple[int, int], differs: Seen | None) -> Callable[[Story], Story]:
        def add(story: Story) -> Story:
            self.cases.append(Case(row, story, since, differs))
            return story

        return add

    def tested(self) -> list[tuple[str, str]]:
        return sorted((case.row, "different" if case.differs else "same") for case in self.cases)

    def documented(self) -> list[tuple[str, str]]:
        return sorted(sections()[self.title])


def sections() -> dict[str, list[tuple[str, str]]]:
    """The rows of each section of the document that has any: what is compared, and ``same`` or ``different``."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in DOCUMENT.read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| (.+?) \| (same|different) \|", section, re.MULTILINE)
        if rows:
            found[section.partition("\n")[0]] = rows
    return found
