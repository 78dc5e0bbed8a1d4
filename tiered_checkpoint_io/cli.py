"""The command line: run a drain, look at both tiers, verify, export, clean."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import EARLIER_TRAINERS_FILE, LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.leasing.namespace_lock import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DrainError,
    InvalidNameError,
    ManifestError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import get_logger, gib
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier, namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import FileEntry, Manifest
from tiered_checkpoint_io.stores import Store, open_store

app = typer.Typer(
    help="Checkpoints in node memory and on the durable tier.", no_args_is_help=True, pretty_exceptions_enable=False
)

_MemoryDir = Annotated[str, typer.Option(help="The folder that holds the memory tier.")]
_Namespace = Annotated[str, typer.Option(help="The job's namespace.")]
_Root = Annotated[Path | None, typer.Option(help="The memory tier's root itself, in place of the two.")]
_Endpoint = Annotated[str | None, typer.Option(help="Of an S3 server other than AWS.")]
#: How often a drain that stands by looks whether it is needed, seconds.
_STAND_BY_S = 1.0
_SHOWN_OUTCOMES = 10
_SHM = "/dev/shm"  # noqa: S108 - where the memory tier lies by default


def main() -> None:
    """Runs a command; an error of ours is one line on stderr and exit status 1."""
    try:
        app()
    except TieredCheckpointError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error


@app.command()
def drain(
    root: _Root = None,
    memory_dir: _MemoryDir = _SHM,
    namespace: _Namespace = "default",
    once: Annotated[bool, typer.Option(help="Leave once nothing can be done now.")] = False,
    stay: Annotated[bool, typer.Option(help="Wait for work for ever, as a sidecar does.")] = False,
) -> None:
    """Moves checkpoints from node memory to the durable tier."""
    root = _existing(root or namespace_root(memory_dir, namespace))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log = get_logger(root.name)
    worker = Drain(root, logger=log, stop=stop, stay=stay)
    if not worker.run(once=once):
        log.info("another drain works on %s; %s", root, "standing by" if stay else "leaving")
        while stay and not stop.wait(_STAND_BY_S) and not worker.run(once=once):
            pass
    elif once and (left := _undone(root)):
        raise DrainError(
            f"{left} operations are not done",
            operation="drain",
            tier="durable",
            key=str(root),
            hint=f"last error: {Queue(root).progress().last_error or 'none'}",
        )


@app.command()
def status(root: _Root = None, memory_dir: _MemoryDir = _SHM, namespace: _Namespace = "default") -> None:
    """Shows what lies in node memory and what the drain does."""
    root = _existing(root or namespace_root(memory_dir, namespace))
    tier, queue = _tier(root), Queue(root)
    own = [_row(stored, _state(tier, stored)) for stored in reversed(tier.parts())]
    own += [(str(folder), "?", "?", "?", f"damaged: {error}", "?") for folder, error in tier.damaged()]
    _show("Checkpoints in memory", own, "name", "step", "rank", "size", "state", "on peers too")
    copies = [_row(stored) for stored in reversed(tier.replicas.parts())]
    copies += [(str(folder), "?", "?", "?", f"damaged: {error}") for folder, error in tier.replicas.damaged()]
    if copies:
        _show("Copies kept for other nodes", copies, "name", "step", "rank", "size", "all parts on peers")
    outcomes = [
        (each.action, each.name, each.state, gib(each.bytes) if each.bytes else "", each.error)
        for each in reversed(queue.outcomes()[-_SHOWN_OUTCOMES:])
    ]
    if outcomes:
        _show("Last operations on the durable tier", outcomes, "operation", "name", "outcome", "size", "error")
    progress = queue.progress()
    age = time.time() - progress.heartbeat
    seen = f"process {progress.pid}, last seen {age:.0f} s ago" if progress.pid else "has not run"
    typer.echo(
        f"drain: {seen}, {progress.pending} pending"
        + (f", {progress.name} {gib(progress.bytes_done)} of {gib(progress.bytes_total)}" if progress.name else "")
        + (f"\nlast error: {progress.last_error}" if progress.last_error else "")
    )


@app.command("ls")
def list_durable(dirpath: str, endpoint_url: _Endpoint = None) -> None:
    """Lists the checkpoints of a durable tier."""
    store = _store(dirpath, endpoint_url)
    rows: list[tuple[str, ...]] = []
    damaged = False
    for name in _names(store):
        try:
            manifest = read_manifest(store, name)
        except (ManifestError, InvalidNameError) as error:
            # The others are there all the same.
            damaged = True
            rows.append((name, "?", "?", "?", f"damaged: {error}"))
            continue
        if manifest is not None:
            content = manifest.content
            created = datetime.fromtimestamp(content.created, timezone.utc).isoformat(timespec="seconds")
            rows.append((name, str(content.step), gib(content.size), created, manifest.alias_of or ""))
    _show(store.url, rows, "name", "step", "size", "created", "alias of")
    raise typer.Exit(1 if damaged else 0)


@app.command("verify")
def verify_durable(
    dirpath: str, name: Annotated[str | None, typer.Argument()] = None, endpoint_url: _Endpoint = None
) -> None:
    """Reads checkpoints of a durable tier and compares every byte with its hash."""
    store = _store(dirpath, endpoint_url)
    bad = 0
    chosen = [ids.name_in(ids.normalize_dirpath(dirpath), name)] if name else _names(store)
    if not chosen:
        # Whoever meant another place must not take this for good news.
        raise CheckpointNotFoundError("no checkpoint to verify", operation="verify", tier="durable", key=store.url)
    for each in chosen:
        try:
            manifest = read_manifest(store, each)
            if manifest is None:
                raise CheckpointNotFoundError("no such checkpoint", tier="durable", key=each)
            if manifest.alias_of and (target := read_manifest(store, manifest.alias_of)) is not None:
                manifest = target
            _verify(store, manifest)
            typer.echo(f"intact   {each}")
        except TieredCheckpointError as error:
            bad += 1
            typer.echo(f"DAMAGED  {each}: {error}")
    raise typer.Exit(1 if bad else 0)


@app.command("export")
def export_sharded(
    dirpath: str,
    name: str,
    target: Path,
    file_format: Annotated[str, typer.Option("--format", help="torch (one file) or safetensors (a folder).")] = "torch",
    prefix: Annotated[
        str | None, typer.Option(help="For safetensors: of the tensors' names; 'state_dict.' by default.")
    ] = None,
    max_shard_size: Annotated[int, typer.Option(help="For safetensors: bytes of one file.")] = 5 * 10**9,
    trust: Annotated[bool, typer.Option(help="For torch: allow objects that may run code when loaded.")] = False,
    endpoint_url: _Endpoint = None,
) -> None:
    """Writes a sharded checkpoint (its NAME, or tiered:latest) as files for others, in little memory."""
    from tiered_checkpoint_io.export import export_checkpoint

    written = export_checkpoint(
        dirpath,
        name,
        target,
        format=file_format,  # type: ignore[arg-type]
        prefix=prefix,
        max_shard_size=max_shard_size,
        weights_only=not trust,
        endpoint_url=endpoint_url,
    )
    for file in written:
        typer.echo(f"{file}: {gib(file.stat().st_size)}")


@app.command()
def clean(
    root: _Root = None,
    memory_dir: _MemoryDir = _SHM,
    namespace: _Namespace = "default",
    force: Annotated[bool, typer.Option(help="Also what waits for the durable tier, or is in use.")] = False,
) -> None:
    """Deletes a namespace's checkpoints from node memory, and from its spill on the node's disk."""
    root = root or namespace_root(memory_dir, namespace)
    spill = _tier(root).spill
    if not root.is_dir():
        typer.echo(f"nothing at {root}")
        if spill is not None and (force or not any(stored.pending for stored in spill.parts())):
            shutil.rmtree(spill.root)
        return
    if not any((root / folder).is_dir() for folder in FOLDERS):
        raise ConfigError(f"{root} is no memory tier, and was left as it is", hint="check --root")
    locks = [try_lock(root / name) for name in (LOCK_FILE, TRAINERS_FILE, EARLIER_TRAINERS_FILE, JOB_FILE)]
    try:
        pending = _undone(root)
        if not force and (None in locks or pending):
            what = "a trainer or drain uses it" if None in locks else f"{pending} operations are not yet durable"
            raise ConfigError(f"{root} was left as it is: {what}", hint="run the drain first, or give --force")
        shutil.rmtree(root)
        if spill is not None:
            shutil.rmtree(spill.root)
    finally:
        for lock in locks:
            if lock is not None:
                release(lock)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def _row(stored: StoredPart, *state: str) -> tuple[str, ...]:
    content = stored.part.content
    # Of a save of several ranks, only all parts together are safe.
    safe = "yes" if stored.replicated else "no"
    return stored.part.name, str(content.step), str(stored.part.rank), gib(content.size), *state, safe


def _state(tier: MemoryTier, stored: StoredPart) -> str:
    state = "waits for the durable tier" if stored.pending else "durable" if stored.part.durable else "memory only"
    return f"{state} (on disk)" if tier.is_spilled(stored.folder) else state


def _tier(root: Path) -> MemoryTier:
    """The memory tier of a root with its spill, as the last trainer had it."""
    tier = MemoryTier(root)
    tier.use_spill(AUTO)
    with contextlib.suppress(OSError, ConfigError):
        tier.use_spill(TieredCheckpointConfig.from_json((root / CONFIG_FILE).read_text()).spill_dir)
    return tier


def _existing(root: Path) -> Path:
    if not all((root / folder).is_dir() for folder in FOLDERS):
        raise ConfigError(f"no memory tier at {root}", hint="check --memory-dir and --namespace, or --root")
    return root


def _undone(root: Path) -> int:
    """How many saves, aliases and deletes wait for the durable tier, but for what only a further save sets free."""
    try:
        return len(Queue(root).doable(_tier(root)))
    except FileNotFoundError:
        # Half cleaned away already.
        return 0


def _store(dirpath: str, endpoint_url: str | None) -> Store:
    return open_store(TieredCheckpointConfig.from_any(dirpath=dirpath, endpoint_url=endpoint_url))


def _names(store: Store) -> list[str]:
    found = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    return sorted(name for name in found if name is not None)


def _verify(store: Store, manifest: Manifest) -> None:
    """Raises the error of a checkpoint's newest content where its bytes match no content at all."""
    first: TieredCheckpointError | None = None
    for content in (manifest.content, *manifest.previous):
        try:
            for entry in files_of(store, content).all():
                _verify_file(store, entry)
        except TieredCheckpointError as error:
            first = first or error
        else:
            return
    assert first is not None
    raise first


def _verify_file(store: Store, entry: FileEntry) -> None:
    size = store.size(entry.path)
    if size != entry.size:
        raise CorruptCheckpointError(
            f"{size} bytes in place of {entry.size}", operation="verify", tier="durable", key=entry.path
        )
    buffer = memoryview(bytearray(min(entry.size, entry.chunk_size)))
    for index, (offset, length) in enumerate(entry.chunks):
        with buffer[:length] as chunk:
            store.read_into(entry.path, offset, chunk)
            entry.check_chunk(index, chunk, tier="durable", where=entry.path)


def _show(title: str, rows: Iterable[tuple[str, ...]], *columns: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
