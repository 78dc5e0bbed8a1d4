"""The command that makes checkpoints of others, bytes unchanged, committed ones of a durable tier."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask, counter
from tiered_checkpoint_io.cli.claiming import claimed
from tiered_checkpoint_io.cli.documents import ImportedAll
from tiered_checkpoint_io.cli.options import SERVER, Dirpath, Json, Server, wrong_use
from tiered_checkpoint_io.cli.output import READER_GONE, printable, say, write_json
from tiered_checkpoint_io.cli.progress import progress
from tiered_checkpoint_io.engine.durable.manifests import names_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    StoreAccessError,
    StoreConfigError,
    StoreNotFoundError,
    UsageError,
)
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store, place_of

if TYPE_CHECKING:
    from tiered_checkpoint_io.imports.layouts import ForeignCheckpoint, Imported


def import_(
    source: Annotated[str, typer.Argument(help="Checkpoints of another library: a path, S3 URL or fsspec URL.")],
    dirpath: Dirpath,
    name: Annotated[
        str | None, typer.Option(help="A new name, where SOURCE is one checkpoint; by default its own.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace checkpoints and files that have the names already.")] = False,
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Makes checkpoints of others committed ones of DIRPATH, bytes unchanged; tiered:latest then takes the last.

    Takes files of torch.save (Lightning, NeMo), NeMo's .nemo archives (the weights in them), folders of
    torch.distributed.checkpoint, and the SageMaker library's rank_R/step_N folders. Looks at them without running
    anything that is in them. The order is that of their steps, and they count as saved now. Refused while a run writes
    to DIRPATH.
    """
    with wrong_use():
        origin = ids.normalize_dirpath(source)
        target = ids.normalize_dirpath(dirpath)
        wanted = ids.validate_name(name) if name is not None else None
    # The options are about S3, wherever that is.
    is_target = ids.is_s3_url(target) or not ids.is_s3_url(origin)
    config = server.config(target if is_target else origin)
    rows: list[Imported] = []
    stop, reader_gone = threading.Event(), False

    def done(row: Imported) -> None:
        nonlocal reader_gone
        rows.append(row)
        if not json:
            try:
                say(_line(row))
            except SystemExit:
                # A closed pipe must not stop it amid its work.
                reader_gone = True

    # Before the server is asked: torch takes its time.
    from tiered_checkpoint_io.imports.importing import import_checkpoints

    def find(_: Store) -> tuple[list[ForeignCheckpoint], int]:
        others, file = _opened(config, origin)
        with contextlib.closing(others):
            given = _found(others, file, wanted)
            _refuse_ours(config, others.url, given[0], target)
            return given

    def work(store: Store) -> None:
        others, _ = _opened(config, origin)
        # Read to be hashed, and sent.
        with contextlib.closing(others), progress("import", 2 * size, silent=json) as meter:
            place, count = place_of(config, target), counter("import", target, stop, meter.add)
            import_checkpoints(others, found, store, place, force=force, progress=count, done=done)

    found, size = ask(config, find, target)
    with claimed(config, stop, target):
        ask(config, work, target, stop=stop)
    good = all(row.state == "imported" for row in rows)
    if json:
        write_json("import", ImportedAll(source, target, good, rows))
    raise typer.Exit(1 if not good else READER_GONE if reader_gone else 0)


def _opened(config: TieredCheckpointConfig, origin: str) -> tuple[Store, str]:
    """The folder that a source is, or that it lies in, and then its own name there."""
    parent, _, name = origin.rpartition("/")
    is_local = ids.url_scheme(origin) is None
    if not parent or parent.endswith(":/") or (is_local and os.path.isdir(origin)):
        return open_store(config, origin), ""
    store = open_store(config, parent)
    try:
        store.size(name)
    except StoreNotFoundError:
        store.close()
        return open_store(config, origin), ""
    return store, name


def _found(store: Store, file: str, wanted: str | None) -> tuple[list[ForeignCheckpoint], int]:
    """The checkpoints of others, in order, and how many bytes they have.

    Raises:
        CheckpointNotFoundError: There are none.
    """
    from tiered_checkpoint_io.imports.layouts import find, find_file

    listed = {entry.key: entry for entry in store.list(file) if file in ("", entry.key)}
    if file:
        found = [find_file(file, listed[file].modified)]
    else:
        base = store.url.rstrip("/").rpartition("/")[2]
        found = find([(entry.key, entry.modified) for entry in listed.values()], base=base)
    if not found:
        text = "no checkpoint that can be imported is there"
        hint = (
            "a file of torch.save, a .nemo archive, a folder of torch.distributed.checkpoint, or rank_R/step_N folders"
        )
        raise CheckpointNotFoundError(text, operation="import", key=ids.join_url(store.url, file), hint=hint)
    if wanted is not None:
        if len(found) > 1:
            raise typer.BadParameter(f"--name is for one checkpoint, and there are {len(found)}")
        found = [_renamed(found[0], wanted)]
    return found, sum(listed[key].size for each in found for key in each.files.values())


def _refuse_ours(config: TieredCheckpointConfig, url: str, found: list[ForeignCheckpoint], target: str) -> None:
    """Refuses checkpoints of another durable tier of this package.

    Their manifests know more than their files: which is the newest, what training can't resume from, and the hashes.
    What was damaged there would have good hashes here.
    """
    keys = [next(iter(each.files.values())) for each in found]
    paths = {key if each.layout == "torch" else key.rpartition("/")[0] for key, each in zip(keys, found, strict=True)}
    while url != target:
        try:
            with contextlib.closing(open_store(config, url)) as store:
                names = names_of(store)
        except (StoreAccessError, StoreConfigError):
            # Who may read the checkpoints alone can't know.
            return
        if ours := sorted(paths & names):
            raise UsageError(
                f"{ours[0]} is a checkpoint of this package already",
                operation="import",
                key=url,
                hint="copy that folder whole, with .tiered in it, as `aws s3 sync` does, once no run writes to it; or"
                f" load it from there: ckpt_path={ids.join_url(url, ours[0])}",
            )
        url, _, folder = url.rpartition("/")
        if not url or url.endswith(":/"):
            return
        paths = {f"{folder}/{path}".rstrip("/") for path in paths}


def _renamed(found: ForeignCheckpoint, name: str) -> ForeignCheckpoint:
    is_full = found.layout in ("torch", "nemo")
    files = {name.rpartition("/")[2]: key for key in found.files.values()} if is_full else found.files
    return replace(found, name=name, files=files)


def _line(row: Imported) -> str:
    """A row for people."""
    if row.state != "imported":
        hint = f"; {row.hint}" if row.hint else ""
        return printable(f"{'FAILED' if row.state == 'failed' else 'exists':<10}{row.name}: {row.error}{hint}")
    step = f"step {row.step}, " if row.step is not None else ""
    note = "" if row.resumable else "; not resumable: load it by name"
    done = "earlier" if row.earlier else "imported"
    return printable(f"{done:<10}{row.name} ({step}{size_text(row.size_bytes)}{note})")
