"""Tools that the examples share: a real S3 server, lives of a trainer that end by SIGKILL, and their reports."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIFE_TIMEOUT_S = 240.0
DRAIN_TIMEOUT_S = 60.0
NAMESPACE = "demo"


@dataclass
class Stage:
    """Setting of a story.

    Attributes:
        base: The durable tier of all its runs.
        memory_dir: The node's memory.
        folder: Reports and logs.
        env: The environment of its trainers.
    """

    base: str
    memory_dir: str
    folder: Path
    env: dict[str, str]

    def live(self, script: str, run: str, *further: str, kill_after: int | None = None) -> dict[str, Any]:
        """One life of a trainer, to its end or until it is killed, with all processes that it started.

        Args:
            script: Is run as ``script --train DIRPATH MEMORY_DIR REPORT ...``.
            run: The folder of its checkpoints.
            further: Further arguments.
            kill_after: The step after which all of its processes get SIGKILL.

        Returns:
            ``start``, ``step`` and ``seconds`` of its restore, ``saves``, ``losses``, ``digest`` of its
            weights, how long it lived (``life``), and after which step it ``died``.
        """
        report = self.folder / f"life-{secrets.token_hex(4)}.jsonl"
        report.touch()
        began = time.monotonic()
        with open(self.folder / "trainer.log", "ab") as log:
            arguments = ["--train", f"{self.base}/{run}", self.memory_dir, str(report), *further]
            trainer = subprocess.Popen(
                [sys.executable, "-W", "ignore", script, *arguments],
                env=self.env,
                stdout=log,
                stderr=log,
                # A process group of its own, with the ranks that Lightning starts.
                start_new_session=True,
            )
        try:
            while trainer.poll() is None:
                at = max((line["at"] for line in _read(report) if "at" in line), default=0)
                if kill_after is not None and at >= kill_after:
                    break
                if time.monotonic() - began > LIFE_TIMEOUT_S:
                    raise RuntimeError("the trainer takes too long")
                time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)
            trainer.wait()
        lines = _read(report)
        if not any(("digest" if kill_after is None else "start") in line for line in lines):
            raise RuntimeError("the trainer failed:\n" + (self.folder / "trainer.log").read_text()[-3000:])
        start = next(line for line in lines if "start" in line)
        return {
            **start,
            "died": max(line["at"] for line in lines if "at" in line) if kill_after is not None else None,
            "saves": [line for line in lines if "save" in line],
            "losses": {line["at"]: line["loss"] for line in lines if "loss" in line},
            "digest": next((line["digest"] for line in lines if "digest" in line), None),
            "life": time.monotonic() - began,
        }

    def wipe(self) -> None:
        """Empties node memory, as a reboot does."""
        shutil.rmtree(self.memory_dir)
        os.mkdir(self.memory_dir, 0o700)

    def drained(self) -> dict[str, int]:
        """Waits until the drain, which outlives its trainer, has left; what it counted."""
        from tiered_checkpoint_io.engine.drain.queue import Queue
        from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, try_lock
        from tiered_checkpoint_io.memory.tier import namespace_root

        root = namespace_root(self.memory_dir, NAMESPACE)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while (lock := try_lock(root / LOCK_FILE)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("the drain does not leave")
            time.sleep(0.05)
        os.close(lock)
        return Queue(root).progress().counters


@contextlib.contextmanager
def stage(s3: str | None) -> Iterator[Stage]:
    """A stage that is gone afterwards: a private memory tier, and a local S3 server unless ``s3`` is given."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from support.rclone_server import RcloneServer

    with contextlib.ExitStack() as stack:
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        memory_dir = tempfile.mkdtemp(prefix="tiered-demo-", dir=shm)
        stack.callback(shutil.rmtree, memory_dir, ignore_errors=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-demo-")))
        env = dict(os.environ)
        if s3:
            base = f"{s3.rstrip('/')}/demo-{secrets.token_hex(4)}"
        else:
            server = stack.enter_context(RcloneServer())
            env.update(server.env())
            base = server.make_bucket("demo")
        print(f"checkpoints: {memory_dir} and {base}", flush=True)
        yield Stage(base, memory_dir, folder, env)


class Notes:
    """Report of a trainer about its life: one line of JSON at a time."""

    def __init__(self, report: str) -> None:
        self._report = report

    def __call__(self, **facts: Any) -> None:
        with open(self._report, "a") as file:
            file.write(json.dumps(facts) + "\n")

    def began(self, io: Any) -> None:
        """Reports the source from which training began."""
        restored = io.checkpointer.restored
        if restored is None:
            self(start="scratch", step=0, seconds=0.0)
        else:
            self(start=restored.tier, step=restored.step, seconds=restored.seconds)

    def stepped(self, io: Any, step: int, **facts: Any) -> None:
        """The end of a step, and what it saved."""
        save = io.checkpointer.session.last_save
        if save is not None and save.step == step:
            self(save=save.step, stall=save.stall_s, size=save.size, tiers=sorted(save.tiers))
        self(at=step, **facts)


def behind_checkpoints(callback: type[Any]) -> Any:
    """An instance that Lightning runs after all checkpoint callbacks (it moves these to the end)."""
    from lightning.pytorch.callbacks import Checkpoint

    return type(callback.__name__, (callback, Checkpoint), {"state_key": callback.__name__})()


def show(title: str, rows: list[tuple[str, dict[str, Any], dict[str, int]]]) -> None:
    """The table of all lives."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("life", "began from", "at step", "restore", "ended", "stalls of its saves, ms", "to S3", "requests"):
        table.add_column(column)
    for name, life, counters in rows:
        stalls = " ".join(f"{line['stall'] * 1000:.0f}" for line in life["saves"])
        requests = sum(count for key, count in counters.items() if key.startswith("requests."))
        table.add_row(
            name,
            life["start"],
            str(life["step"]),
            f"{life['seconds']:.2f} s" if life["step"] else "-",
            f"killed after {life['died']}" if life["died"] else "finished",
            stalls,
            f"{counters.get('bytes.up', 0) / (1 << 20):.0f} MiB",
            str(requests),
        )
    Console(width=130 if not sys.stdout.isatty() else None).print(table)


def _read(report: Path) -> list[dict[str, Any]]:
    """The whole lines of a report that may be being written."""
    return [json.loads(line) for line in report.read_text().splitlines(keepends=True) if line.endswith("\n")]
