"""The command that fetches a checkpoint from the durable tier: to this node's memory, to a file, or to a folder."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask, counter
from tiered_checkpoint_io.cli.options import Dirpath, Name, Node, Output, Server, name_of, path_of, wrong_use
from tiered_checkpoint_io.cli.output import progress, say, write_json
from tiered_checkpoint_io.cli.verify import check_part
from tiered_checkpoint_io.engine.durable.damage import contents_there
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryTierError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.inventory.durable import find, read_unchanged
from tiered_checkpoint_io.inventory.rows import File
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import MemoryFullError, node_budget
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest, Part
from tiered_checkpoint_io.stores import Store, place_of
from tiered_checkpoint_io.stores.silence import local_work, moving

if TYPE_CHECKING:
    from tiered_checkpoint_io.export import Source

#: Suffixes of files that torch.load reads.
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"


class Format(str, Enum):
    """The form in which a checkpoint is written."""

    files = "files"
    torch = "torch"
    safetensors = "safetensors"


@dataclass(frozen=True, kw_only=True)
class Get(Output, Server, Node):
    """Fetches a checkpoint from the durable tier: to this node's memory, to a file, or to a folder.

    Every byte is verified. Without TO it goes into this node's memory, from which a restart then reads. With TO it is
    written as a torch file (.pt, .pth, .bin, .ckpt), as safetensors (.safetensors), or else as a folder with its files.
    It is there with all parts, or not at all.
    """

    dirpath: Dirpath
    name: Name = None
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
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="By default the namespace that saved the checkpoint.")
    ] = None

    def run(self) -> None:
        """Fetches the checkpoint, and prints its place."""
        config = self.config(self.dirpath)
        self._check()
        with wrong_use():
            config = replace(config, memory_dir=self.memory_dir)
            config = replace(config, namespace=self.namespace) if self.namespace is not None else config
            wanted = name_of(config, self.name or ids.LATEST)
        # Torch takes its time, and the silence of the server is limited.
        importlib.import_module("torch")
        stop = threading.Event()
        got = ask(config, _Fetch(config, wanted, self, stop).run, stop=stop)
        if self.as_json:
            write_json("get", got)
        elif got.files:
            for each in got.files:
                say(f"{each.path}: {size_text(each.size_bytes)}")
        else:
            there = str(got.folder) if got.folder is not None else f"node memory, namespace {got.namespace}"
            is_new, size = got.fetched_size_bytes > 0, size_text(got.fetched_size_bytes)
            say(f"fetched {got.name} ({size}) to {there}" if is_new else f"{got.name} is in {there} already, intact")

    @property
    def written_form(self) -> Format:
        """The form, by the option or the suffix."""
        return Format.files if self.to is None else self.form or _format_of(self.to)

    def _check(self) -> None:
        """Raises BadParameter for options that do not belong together."""
        form = self.written_form
        is_tensors = form is Format.safetensors
        if (self.to is None and (self.form or self.yes)) or (not is_tensors and self.prefix is not None):
            raise typer.BadParameter("--format and --yes need TO, and --prefix needs safetensors")
        if form is not Format.files and (self.rank or self.namespace is not None):
            raise typer.BadParameter(f"--rank and --namespace are not for {form.value}")


def _format_of(to: Path) -> Format:
    if to.is_dir():
        return Format.files
    if to.suffix == _SAFETENSORS:
        return Format.safetensors
    return Format.torch if to.suffix in _TORCH else Format.files


@dataclass(frozen=True, slots=True)
class Got:
    """A checkpoint that was fetched.

    Attributes:
        name: Its name.
        dirpath: The durable tier.
        step: The training step; None if it is not known.
        namespace: The namespace of node memory that has it; None for files.
        folder: The folder of its files as saved; None for others.
        fetched_size_bytes: Bytes that were read; 0 if node memory had all of it.
        ranks: Ranks whose parts were asked for.
        files: The torch file, or safetensors.
    """

    name: str
    dirpath: str
    step: int | None
    namespace: str | None
    folder: Path | None
    fetched_size_bytes: int
    ranks: Sequence[int]
    files: Sequence[File]


# ------------------------------------------------------------------------------------------- fetch
@dataclass(frozen=True, slots=True)
class _Fetch:
    """Fetches a checkpoint to node memory or files; every byte is verified.

    Attributes:
        config: The durable tier, and node memory.
        wanted: The checkpoint's name, or ``tiered:latest``.
        options: The ranks, and node memory or files.
        stop: Ends it.
    """

    config: TieredCheckpointConfig
    wanted: str
    options: Get
    stop: threading.Event

    def run(self, store: Store) -> Got:
        """Fetches the checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CorruptCheckpointError: Its bytes differ from the saved ones.
            MemoryFullError: Memory has no room for it.
            SaveError: A file exists already, or can't be written.
            StoreError: A run removed or overwrote it, each time that it was read.
        """

        def look() -> tuple[Manifest, Manifest]:
            manifest = _find(store, self.wanted)
            return manifest, manifest

        def work(manifest: Manifest) -> Got:
            errors: list[TieredCheckpointError] = []
            for content in contents_there(store, manifest):
                try:
                    return self._content(store, manifest.name, content)
                except (CorruptCheckpointError, StoreNotFoundError, MemoryFullError) as error:
                    errors.append(error)
            # The one without room may be the one that is intact.
            raise next((each for each in errors if isinstance(each, MemoryFullError)), errors[0])

        return read_unchanged(store, look, work, operation="get")

    def _content(self, store: Store, name: str, content: Content) -> Got:
        to, config = self.options.to, self.config
        namespace, files, ranks, size = None, [], [], 0
        if to is not None and self.options.written_form is not Format.files:
            size = content.size
            files = [File(str(path), path.stat().st_size) for path in self._convert(store, name, content, to)]
        else:
            parts = fetched = _parts(config, store, name, content, self.options.rank or ())
            with contextlib.ExitStack() as held:
                if to is not None:
                    views = held.enter_context(_files(to, parts, replace=self.options.yes))
                else:
                    # A restart looks only in the namespace of its job.
                    namespace = self.options.namespace or content.namespace or config.namespace
                    tier = _open(config, namespace)
                    fetched = [part for part in parts if not _has(tier, part)]
                    views = held.enter_context(_slots(tier, fetched))
                entries = [entry for part in fetched for entry in part.content.files]
                size = sum(entry.size for entry in entries)
                held.enter_context(self._source(store, name, content, entries, size)).fetch(views)
            ranks = [part.rank for part in parts]
        folder = to if to is not None and not files else None
        return Got(name, config.dirpath, ids.known(content.step), namespace, folder, size, ranks, files)

    def _convert(self, store: Store, name: str, content: Content, to: Path) -> list[Path]:
        """Writes a torch file or safetensors; returns the files."""
        from tiered_checkpoint_io.export import to_safetensors, to_torch_file

        options = self.options
        with self._source(store, name, content, files_of(store, content).all(), content.size) as source:
            if options.written_form is Format.torch:
                return to_torch_file(source, to, replace=options.yes)
            return to_safetensors(source, to, prefix=options.prefix, replace=options.yes)

    @contextlib.contextmanager
    def _source(
        self, store: Store, name: str, content: Content, files: Sequence[FileEntry], size: int
    ) -> Iterator[Source]:
        """Yields the checkpoint whose files are read, and shows the progress."""
        from tiered_checkpoint_io.engine.trust import Trust
        from tiered_checkpoint_io.export import Source

        with progress("get", size, silent=self.options.as_json) as add:
            count = counter("get", store.url, self.stop, add)
            trust = Trust(weights_only=not self.options.trust)
            yield Source(store, name, content, files, trust, self.config.read_concurrency(), count)


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
    """Returns the parts of a checkpoint that are asked for, as memory holds them."""
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
    """Returns True if memory has a part already, intact; a damaged one is quarantined."""
    heard = moving()
    for stored in tier.held():
        if (stored.save_id, stored.part.rank) == (part.save_id, part.rank):
            checked = check_part(tier, stored, lambda _: heard())
            if checked.state == "damaged":
                tier.quarantine(stored.folder, checked.error or "")
            elif checked.state == "intact":
                return True
    return False


_Views = Mapping[str, memoryview]


@contextlib.contextmanager
def _slots(tier: MemoryTier, parts: Sequence[Part]) -> Iterator[_Views]:
    """Makes room in memory for the files of parts, which are committed if the block does not raise."""
    from tiered_checkpoint_io.engine.staging.arriving import SlotDestination

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
                # Another process has fetched the part meanwhile, such as this command in another task of the node.
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
def _files(folder: Path, parts: Sequence[Part], *, replace: bool) -> Iterator[_Views]:
    """Makes files below a folder, which get their names if the block does not raise; the switch gets its name last."""
    from tiered_checkpoint_io.export import new_files

    entries = [(entry, part.content.switch) for part in parts for entry in part.content.files]
    entries.sort(key=lambda each: each[0].basename == each[1])
    targets = [(folder / entry.path, entry.size) for entry, _ in entries]
    with new_files(targets, replace=replace) as mappings, contextlib.ExitStack() as held:
        yield {
            entry.path: held.enter_context(memoryview(mapping))
            for (entry, _), mapping in zip(entries, mappings, strict=True)
        }
