"""The command that fetches a checkpoint from the durable tier: to this node's memory, to a file, or to a folder."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_checkpoint_io.cli.answers import ask, counter
from tiered_checkpoint_io.cli.options import (
    SERVER,
    SHM,
    Address,
    Dirpath,
    Json,
    MemoryDir,
    Name,
    Server,
    name_of,
    path_of,
    wrong_use,
)
from tiered_checkpoint_io.cli.output import Meter, printable, progress, say, write_json
from tiered_checkpoint_io.cli.verify import check_part
from tiered_checkpoint_io.engine.chunks import fetch_chunk
from tiered_checkpoint_io.engine.durable.damage import contents_there
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ExportError,
    ManifestError,
    MemoryFullError,
    MemoryTierError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.inventory.details import File
from tiered_checkpoint_io.inventory.durable import find, read_unchanged
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import node_budget
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest, Part
from tiered_checkpoint_io.stores import Store, place_of
from tiered_checkpoint_io.stores.silence import local_work, moving

#: Suffixes of files that torch.load reads.
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"


class Format(str, Enum):
    """The form in which a checkpoint is written."""

    files = "files"
    torch = "torch"
    safetensors = "safetensors"


@dataclass(frozen=True)
class Target:
    """The place and the form of a checkpoint that is fetched: options of the command, see :func:`spread`."""

    to: Annotated[
        Path | None, typer.Argument(parser=path_of, metavar="TO", help="A file or folder, instead of node memory.")
    ] = None
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="torch: one file; safetensors: a file, or a folder of shards; files: a folder of the files as saved."
            " By default the suffix of TO says it.",
        ),
    ] = None
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="For safetensors: only tensors of this prefix, without it; default state_dict."
        ),
    ] = None
    trust: Annotated[bool, typer.Option("--trust", help="Allow objects that may run code when loaded.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Replace files that exist.")] = False
    rank: Annotated[
        list[int] | None, typer.Option(min=0, metavar="RANK", help="Only the part of this rank; may be repeated.")
    ] = None
    memory_dir: MemoryDir = SHM
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="By default the namespace that saved the checkpoint.")
    ] = None

    @property
    def written_form(self) -> Format:
        """The form, by the option or the suffix."""
        return Format.files if self.to is None else self.form or _format_of(self.to)

    def check(self) -> None:
        """Raises BadParameter for options that do not belong together."""
        form = self.written_form
        if (self.to is None and (self.form or self.yes)) or (
            form is not Format.safetensors and self.prefix is not None
        ):
            raise typer.BadParameter("--format and --yes need TO, and --prefix needs safetensors")
        if form is not Format.files and (self.rank or self.namespace is not None):
            raise typer.BadParameter(f"--rank and --namespace are not for {form.value}")


def get(
    dirpath: Dirpath,
    name: Name = None,
    target: Target = Target(),
    server: Server = SERVER,
    as_json: Json = False,
) -> None:
    """Fetches a checkpoint from the durable tier: to this node's memory, to a file, or to a folder.

    Every byte is verified. Without TO it goes into this node's memory, from which a restart then reads. With TO it is
    written as a torch file (.pt, .pth, .bin, .ckpt), as safetensors (.safetensors), or else as a folder with its files.
    It is there with all parts, or not at all.
    """
    config, to = server.config(dirpath), target.to
    target.check()
    with wrong_use():
        config = replace(config, memory_dir=target.memory_dir)
        config = replace(config, namespace=target.namespace) if target.namespace is not None else config
        wanted = name_of(config, name or ids.LATEST)
    if to is not None and target.written_form is not Format.files:
        written = _export(config, server, wanted, to, target)
        files = [File(str(path), path.stat().st_size) for path in written]
        if as_json:
            write_json("get", {**_answer(config, wanted), "files": files})
            return
        for each in files:
            say(f"{printable(each.path)}: {size_text(each.size_bytes)}")
        return
    # Torch takes its time, and the silence of the server is limited.
    importlib.import_module("torch")
    stop = threading.Event()
    fetch = _Fetch(config, wanted, target, stop, as_json)
    parts, fetched, where = ask(config, fetch.run, stop=stop)
    content, size = parts[0].content, sum(part.content.size for part in fetched)
    if as_json:
        document = {
            **_answer(config, parts[0].name),
            "step": ids.known(content.step),
            "namespace": where if to is None else None,
            "folder": to,
            "ranks": [part.rank for part in parts],
            "fetched_size_bytes": size,
        }
        write_json("get", document)
        return
    there = str(to) if to is not None else f"node memory, namespace {where}"
    if fetched:
        say(printable(f"fetched {parts[0].name} ({size_text(size)}) to {there}"))
    else:
        say(printable(f"{parts[0].name} is in {there} already, intact"))


def _answer(config: TieredCheckpointConfig, name: str) -> dict[str, Any]:
    """Returns the keys of the JSON document, of which each form sets its own."""
    empty = dict.fromkeys(("step", "namespace", "folder", "fetched_size_bytes"))
    return {"name": name, "dirpath": config.dirpath, **empty, "ranks": [], "files": []}


def _format_of(to: Path) -> Format:
    if to.is_dir():
        return Format.files
    if to.suffix == _SAFETENSORS:
        return Format.safetensors
    return Format.torch if to.suffix in _TORCH else Format.files


# ------------------------------------------------------------------------------------------ export
def _export(config: TieredCheckpointConfig, server: Server, wanted: str, to: Path, options: Target) -> list[Path]:
    """Writes a torch file or safetensors; returns the files."""
    from tiered_checkpoint_io.export import export_checkpoint

    is_tensors = options.written_form is Format.safetensors
    is_folder = is_tensors and to.suffix != _SAFETENSORS
    old = sorted(to.glob("model*.safetensors*")) if is_folder else [to] if os.path.lexists(to) else []
    _refuse_existing(old, yes=options.yes)
    into = to if is_folder else to.parent
    with _scratch(into) if old or (is_tensors and not is_folder) else contextlib.nullcontext() as scratch:
        target = to if scratch is None else scratch if is_tensors else scratch / to.name
        written = export_checkpoint(
            config.dirpath,
            wanted,
            target,
            format="safetensors" if is_tensors else "torch",
            prefix=options.prefix,
            weights_only=not options.trust,
            **({} if is_folder or not is_tensors else {"max_shard_size": sys.maxsize}),
            **{each.name: getattr(server, each.name) for each in fields(Address)},
        )
        if scratch is not None:
            for each in old if is_folder else ():
                each.unlink()
            written = [_moved(each, into / each.name if is_folder else to) for each in written]
    return written


def _refuse_existing(existing: Sequence[Path], *, yes: bool) -> None:
    if existing and not yes:
        more = f", and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise ExportError(
            f"{existing[0]} exists already{more}",
            operation="get",
            key=str(existing[0]),
            hint="give another TO, or replace it by --yes",
        )


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Makes a folder for the time of the block, on the file system of another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".tiered-get-", dir=folder)
    except OSError as error:
        raise ExportError(
            f"{folder} can't be written: {error.strerror or error}",
            operation="get",
            key=str(folder),
            hint="give another TO, in a folder with enough room",
        ) from error
    with made as name:
        yield Path(name)


def _moved(made: Path, target: Path) -> Path:
    made.replace(target)
    return target


# ------------------------------------------------------------------------------------------- fetch
@dataclass(frozen=True, slots=True)
class _Fetch:
    """Fetches the parts of a checkpoint to node memory, or their files to a folder; every byte is verified.

    Attributes:
        config: The durable tier, and node memory.
        wanted: The checkpoint's name, or ``tiered:latest``.
        target: The ranks, and node memory or a folder.
        stop: Ends it.
        silent: Whether no progress is shown.
    """

    config: TieredCheckpointConfig
    wanted: str
    target: Target
    stop: threading.Event
    silent: bool

    def run(self, store: Store) -> tuple[list[Part], list[Part], str]:
        """Returns the parts, those of them that were fetched (memory may have had others), and the namespace.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CorruptCheckpointError: Its bytes are not those that were saved.
            MemoryFullError: Memory has no room for it.
            ExportError: A file exists already, or can't be written.
            StoreChangedError: A run removed or overwrote it, each time that it was read.
        """

        def look() -> tuple[Manifest, Manifest]:
            manifest = _find(store, self.wanted)
            return manifest, manifest

        def work(manifest: Manifest) -> tuple[list[Part], list[Part], str]:
            errors: list[TieredCheckpointError] = []
            for content in contents_there(store, manifest):
                try:
                    return self._content(store, manifest.name, content)
                except (CorruptCheckpointError, ManifestError, StoreNotFoundError, MemoryFullError) as error:
                    errors.append(error)
            # The one without room may be the one that is intact.
            raise next((each for each in errors if isinstance(each, MemoryFullError)), errors[0])

        return read_unchanged(store, look, work, operation="get")

    def _content(self, store: Store, name: str, content: Content) -> tuple[list[Part], list[Part], str]:
        # A restart looks only in the namespace of its job.
        namespace = self.target.namespace or content.namespace or self.config.namespace
        parts = _parts(self.config, store, name, content, self.target.rank or ())
        with contextlib.ExitStack() as held:
            if self.target.to is not None:
                fetched, views = parts, held.enter_context(_files(self.target.to, parts, yes=self.target.yes))
            else:
                tier = _open(self.config, namespace)
                fetched = [part for part in parts if not _has(tier, part)]
                views = held.enter_context(_slots(tier, fetched))
            entries = [entry for part in fetched for entry in part.content.files]
            jobs = [(entry, index) for entry in entries for index in range(len(entry.hashes))]
            meter = held.enter_context(progress("get", sum(entry.size for entry in entries), silent=self.silent))
            count = counter("get", store.url, self.stop, meter.add)
            in_parallel(lambda job: _fetch(store, views, *job, count), jobs, self.config.read_concurrency())
        return parts, fetched, namespace


def _find(store: Store, wanted: str) -> Manifest:
    found = find(store, wanted, operation="get")
    if found is None:
        text = f"no such checkpoint: {wanted}"
        hint = "list what is there: tiered-ckpt ls; a checkpoint of another library is loaded by its path"
        raise CheckpointNotFoundError(text, operation="get", tier="durable", key=store.url, hint=hint)
    return found


def _parts(
    config: TieredCheckpointConfig, store: Store, name: str, content: Content, ranks: Sequence[int]
) -> list[Part]:
    """The parts of a checkpoint that are asked for, as memory holds them."""
    place = place_of(config)
    files, there = files_of(store, content), range(content.parts)
    if content.parts == 1:
        there = range(max(content.coordinator, 0), max(content.coordinator, 0) + 1)
    elif unknown := [rank for rank in ranks if rank not in there]:
        raise typer.BadParameter(f"--rank {unknown[0]}: {name} has {content.parts} parts, from rank 0 on")
    return [
        Part(
            name,
            rank,
            replace(content, files=files.of_rank(rank), index=None),
            config.dirpath,
            durable=True,
            server=place.server,
            series=content.series_at(name),
        )
        for rank in there
        if content.parts == 1 or not ranks or rank in ranks
    ]


def _open(config: TieredCheckpointConfig, namespace: str) -> MemoryTier:
    budget = node_budget(config.memory_allocation_percentage, config.memory_dir)
    tier = MemoryTier.open(config.memory_dir, namespace, budget_bytes=budget)
    tier.place = place_of(config)
    return tier


def _has(tier: MemoryTier, part: Part) -> bool:
    """Whether memory has a part already, intact; a damaged one is quarantined."""
    heard = moving()
    for stored in tier.held():
        if (stored.save_id, stored.part.rank) == (part.save_id, part.rank):
            checked = check_part(tier, stored, Meter(lambda _: heard()))
            if checked.state == "damaged":
                tier.quarantine(stored.folder, checked.error or "")
            elif checked.state == "intact":
                return True
    return False


_Views = Mapping[str, memoryview]


@contextlib.contextmanager
def _slots(tier: MemoryTier, parts: Sequence[Part]) -> Iterator[_Views]:
    """Room in memory for the files of parts, which are committed there if the block does not raise."""
    from tiered_checkpoint_io.engine.ranks.transfer import SlotDestination

    destinations = [SlotDestination(tier, part, drained=True) for part in parts]
    try:
        with contextlib.ExitStack() as held:
            views: dict[str, memoryview] = {}
            for part, destination in zip(parts, destinations, strict=True):
                with local_work():
                    opened = held.enter_context(destination.open())
                views |= {entry.path: opened[entry.basename] for entry in part.content.files}
            yield views
        for part, destination in zip(parts, destinations, strict=True):
            try:
                destination.keep()
            except MemoryFullError:
                raise
            except MemoryTierError:
                # Another process has brought it meanwhile, such as this command in another task of the node.
                if not _has(tier, part):
                    raise
                destination.drop()
    except BaseException:
        for destination in destinations:
            destination.drop()
        raise
    finally:
        tier.close()


@contextlib.contextmanager
def _files(folder: Path, parts: Sequence[Part], *, yes: bool) -> Iterator[_Views]:
    """Makes files below a folder, which get their names if the block does not raise; the switch gets its name last."""
    from tiered_checkpoint_io.export.files import new_files

    entries = [(entry, part.content.switch) for part in parts for entry in part.content.files]
    entries.sort(key=lambda each: each[0].basename == each[1])
    paths = [(entry.path, entry.size) for entry, _ in entries]
    old = [folder / path for path, _ in paths if os.path.lexists(folder / path)]
    _refuse_existing(old, yes=yes)
    with _scratch(folder) if old else contextlib.nullcontext(folder) as into:
        for path, _ in paths:
            for below in (into, folder):
                (below / path).parent.mkdir(parents=True, exist_ok=True)
        targets = [(into / path, size) for path, size in paths]
        with new_files(targets) as mappings, contextlib.ExitStack() as held:
            yield {
                path: held.enter_context(memoryview(mapping))
                for (path, _), mapping in zip(paths, mappings, strict=True)
            }
        for path, _ in paths if old else ():
            _moved(into / path, folder / path)


def _fetch(store: Store, views: _Views, entry: FileEntry, index: int, count: Callable[[int], None]) -> None:
    count(0)
    offset, length = entry.chunks[index]
    with views[entry.path][offset : offset + length] as chunk:
        fetch_chunk(store, entry, index, chunk)
    count(length)
