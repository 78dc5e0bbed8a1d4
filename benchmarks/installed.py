"""Ways to save a state that are installed with torch and Lightning, ours among them, with one interface.

Each imports its library when it is made: one that is absent is an ImportError then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
from parts import OF_SAVE
from running import free_port, job_env
from s3_state import BUCKET
from states import all_tensors

PATIENCE_S = 120.0


class Contender:
    """Saves a state: ``save`` is what training waits for, ``finish`` returns when the bytes are where they shall be."""

    #: Place of the bytes after ``finish``.
    where = "tmpfs"
    #: The functions that its saves are split into; see ``parts.py``.
    functions: ClassVar[dict[str, list[str]]] = {}
    #: Why it can't run on a machine without a GPU, in a sentence; "" if it can.
    reason = ""

    def __init__(self, folder: str, url: str) -> None:
        self.folder, self.url = folder, url

    def save(self, state: Any, number: int) -> None:
        raise NotImplementedError

    def finish(self) -> None: ...

    def load(self, number: int, state: Any) -> None:
        raise NotImplementedError

    def clean(self, number: int) -> None:
        """Makes room, as a retention of one would."""
        path = Path(self.path(number))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def path(self, number: int) -> str:
        return f"{self.folder}/save-{number}"

    def close(self) -> None: ...


class Ours(Contender):
    """A memory step: planned, copied, hashed and committed in node memory when it returns."""

    where, functions = "node memory", OF_SAVE
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from tiered_checkpoint_io import TieredCheckpointIO

        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        place: dict[str, Any] = {"dirpath": f"{folder}/durable"}
        if self.where == "S3":
            place = {"dirpath": f"s3://{BUCKET}/ours", "endpoint_url": url, "region": "us-east-1"}
        self.io = TieredCheckpointIO(
            memory_dir=folder, on_save_error="raise", memory_allocation_percentage=100, **place, **self.options
        )

    def save(self, state: Any, number: int) -> None:
        options = {"tiers": ["memory"]} if self.where == "node memory" else None
        self.io.save_checkpoint(state, f"step={number}.ckpt", storage_options=options)

    def finish(self) -> None:
        if self.where == "S3":
            self.io.checkpointer.session.wait(PATIENCE_S)

    def load(self, number: int, state: Any) -> None:
        found = self.io.load_checkpoint(f"step={number}.ckpt")
        for target, source in zip(all_tensors(state), all_tensors(found), strict=True):
            target.copy_(source)

    @contextlib.contextmanager
    def hashing_later(self) -> Iterator[None]:
        """Saves hash once all is copied, and not on the way, so that the two differ."""
        from tiered_checkpoint_io.engine.save.saver import PartSave

        original = PartSave.fill
        PartSave.fill = functools.partialmethod(original, hashed=False)
        try:
            yield
        finally:
            PartSave.fill = original

    def clean(self, number: int) -> None: ...

    def close(self) -> None:
        self.io.teardown()


class OursOverlapped(Ours):
    """A memory step that is copied when it has returned; ``finish`` is what an optimizer's step would wait for."""

    options: ClassVar[dict[str, Any]] = {"staging": "overlapped"}

    def save(self, state: Any, number: int) -> None:
        from tiered_checkpoint_io.engine.save.overlap import Overlap

        saver = self.io.checkpointer.saver
        saver.overlap = Overlap(self.io.checkpointer.session, lambda: list(all_tensors(state)))
        super().save(state, number)

    def finish(self) -> None:
        self.io.checkpointer.saver.show()


class OursToS3(Ours):
    """A durable step: returns when it is in node memory; the drain sends it on."""

    where = "S3"

    def save(self, state: Any, number: int) -> None:
        self.io._save(state, f"step={number}.ckpt", None, wait=False)


class TorchSave(Contender):
    def save(self, state: Any, number: int) -> None:
        torch.save(state, self.path(number))

    def load(self, number: int, state: Any) -> None:
        found = torch.load(self.path(number), mmap=True, weights_only=True)
        for target, source in zip(all_tensors(state), all_tensors(found), strict=True):
            target.copy_(source)


class Lightning(TorchSave):
    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        self.io: Any = TorchCheckpointIO()

    def save(self, state: Any, number: int) -> None:
        self.io.save_checkpoint(state, self.path(number))


class LightningAsync(Lightning):
    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self.make = lambda: AsyncCheckpointIO(self.inner)
        self.inner = self.io
        self.io = self.make()

    def finish(self) -> None:
        # Only its end waits for what it saves; the next save begins with a new thread.
        self.io.teardown()
        self.io = self.make()


class DCP(Contender):
    kind = "sync"

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        import torch.distributed.checkpoint as dcp

        self.dcp, self.pending = dcp, Future[Any]()

    def options(self, number: int) -> dict[str, Any]:
        return {"checkpoint_id": self.path(number)}

    def save(self, state: Any, number: int) -> None:
        self.dcp.save(state, **self.options(number))

    def load(self, number: int, state: Any) -> None:
        self.dcp.load(state, **self.options(number))


class DCPThread(DCP):
    def save(self, state: Any, number: int) -> None:
        saved = self.dcp.async_save(state, **self.options(number))
        self.pending = getattr(saved, "upload_completion", saved)

    def finish(self) -> None:
        self.pending.result(PATIENCE_S)


class DCPProcess(DCPThread):
    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        alone()
        dist.init_process_group("cpu:gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def options(self, number: int) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {
            **super().options(number),
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
            "async_stager": self.stager,
        }

    def load(self, number: int, state: Any) -> None:
        self.dcp.load(state, checkpoint_id=self.path(number))


def alone() -> None:
    """Sets the environment that torch.distributed needs for a job of one rank."""
    os.environ |= job_env(0, 1, free_port())
