"""The commands that read checkpoints whole: one compares every byte with its hash, one fetches."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.options import (
    Address,
    AnyDirpath,
    Dirpath,
    Name,
    Node,
    Nodes,
    Output,
    name_of,
    path_of,
    wrong_use,
)
from tiered_checkpoint_io.cli.output import Columns, progress, row_writer, say, write_json
from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.drain.process import GRACE_S
from tiered_checkpoint_io.engine.durable.damage import Damage, content_or_damage, contents_there
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryTierError,
    StoreError,
    StoreNotFoundError,
    TieredCheckpointError,
    is_other_format,
)
from tiered_checkpoint_io.inventory.node import BrokenPart, HeldPart, held_part, look_at
from tiered_checkpoint_io.inventory.rows import DurableCheckpoint, File, checkpoints, find, read, resumable
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import MemoryFullError, node_budget
from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, Manifest, Part
from tiered_checkpoint_io.stores import Store, place_of
from tiered_checkpoint_io.stores.retry import asking, current_question, local_work, moving

if TYPE_CHECKING:
    from tiered_checkpoint_io.export import Source

#: ``newer``: it needs a newer release; ``changed``: removed or overwritten while it was read; ``gone``: files deleted.
CopyState = Literal["intact", "damaged", "newer", "changed", "gone"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A copy of a checkpoint, or a part of one, after its bytes were read."""

    #: For an unreadable one, the folder or key.
    name: str
    tier: Literal["memory", "durable"]
    state: CopyState
    #: The rank of the part, or of the damaged file; None for all of them.
    rank: int | None = None
    copy: Literal["own", "replica", "spill"] | None = None
    file: str | None = None
    error: str | None = None
    step: int | None = None
    size_bytes: int = 0

    @property
    def is_good(self) -> bool:
        """True if the checkpoint has no defect."""
        return self.state in ("intact", "changed")


Report = Callable[[Checked], None]


class Tier(str, Enum):
    """Tier to look at."""

    memory = "memory"
    durable = "durable"


@dataclass(frozen=True, kw_only=True)
class Verify(Output, Address, Nodes):
    """Reads checkpoints of both tiers, and compares every byte with its hash.

    In memory: this node's own parts, replicas of other nodes' parts, and the spill; with DIRPATH, those that belong to
    it. Names the file, the tier and the rank of any damage, and changes nothing. The exit status is 1 if anything is
    damaged.
    """

    dirpath: AnyDirpath = None
    name: Name = None
    tier: Annotated[Tier | None, typer.Option(help="Only this tier; both by default.")] = None

    def run(self) -> None:
        """Prints a row for each copy or part; the status is 1 if one is damaged."""
        if self.dirpath is None and self.tier is Tier.durable:
            raise typer.BadParameter("--tier durable needs DIRPATH")
        config = self.config(self.dirpath) if self.dirpath is not None else None
        wanted = name_of(config, self.name) if config is not None and self.name is not None else None
        rows: list[Checked] = []
        write = row_writer(_COLUMNS, 8, 7, 40, 4, 7, 4)

        def report(row: Checked) -> None:
            rows.append(row)
            if not self.as_json:
                write(row)

        asks = config is not None and self.tier is not Tier.memory
        looks = self.tier is not Tier.durable and (self.namespace is not None or self.has_memory)
        node = [look_at(each) for each in self.roots()] if looks else []
        place = place_of(config) if config is not None else None
        held = [part for each in node for part in each.parts if place in (None, part.place)]
        damaged = [part for each in node for part in each.damaged if place in (None, part.place)]
        found: list[DurableCheckpoint] = []
        if config is not None and asks:
            found = ask(config, lambda store: _look(store, wanted, in_memory=bool(held)))
        if wanted == ids.LATEST:
            # What a restart on this node would take.
            meant = next(iter(resumable(found, (each.stored for each in held))), None)
            held = [each for each in held if meant is not None and each.save_id == meant.save_id]
            found = [each for each in found if meant is not None and meant.durable and each.name == meant.name]
        elif wanted is not None:
            held = [each for each in held if each.name == wanted]
        _check_memory(held, damaged if wanted is None else [], report, silent=self.as_json)
        if config is not None and asks:
            ask(config, lambda store: check_durable(store, found, report, silent=self.as_json))
        if not rows:
            # Exit status 0 would look as if something had been verified.
            raise CheckpointNotFoundError(
                f"no such checkpoint: {wanted}" if wanted is not None else "no checkpoint to verify",
                operation="verify",
                tier=self.tier.value if self.tier else None,
                key=config.dirpath if config is not None else self.memory_dir,
                hint="list what is there: tiered-ckpt ls, and tiered-ckpt status",
            )
        good = all(row.is_good for row in rows)
        if self.as_json:
            write_json("verify", {"dirpath": self.dirpath, "intact": good, "checkpoints": rows})
        raise typer.Exit(0 if good else 1)


def _look(store: Store, wanted: str | None, *, in_memory: bool) -> list[DurableCheckpoint]:
    """Returns the durable tier's checkpoints, or those of a name."""
    if wanted in (None, ids.LATEST):
        return checkpoints(store, in_memory=in_memory)
    return [each for each in [read(store, wanted)] if each.is_there]


def check_part(held: HeldPart, count: Callable[[int], None]) -> Checked:
    """Reads a part in memory; one that was removed meanwhile is not damaged."""
    stored, part = held.stored, held.stored.part

    def checked(state: CopyState, file: str | None = None, error: str | None = None) -> Checked:
        step, size = ids.known(part.content.step), part.content.size
        return Checked(part.name, "memory", state, part.rank, _COPIES[held.tier], file, error, step, size)

    try:
        with reading(stored) as views:
            for entry in part.content.files:
                where = str(stored.file(entry.basename))
                chunks.verify(entry, views[entry.basename], where=where, progress=count)
    except CheckpointNotFoundError:
        return checked("changed")
    except CorruptCheckpointError as error:
        return checked("damaged", error.key, error.message)
    return checked("intact")


def _check_memory(held: Sequence[HeldPart], damaged: Sequence[BrokenPart], report: Report, *, silent: bool) -> None:
    count = progress("memory", sum(each.size_bytes for each in held), silent=silent)
    for each in held:
        report(check_part(each, count))
    for broken in damaged:
        report(Checked(str(broken.folder), "memory", "newer" if broken.is_newer else "damaged", error=broken.why))


def check_durable(store: Store, found: Sequence[DurableCheckpoint], report: Report, *, silent: bool) -> None:
    sizes = {each.manifest.content.save_id: each.manifest.settled.size for each in found if each.manifest is not None}
    known: dict[str, Content | Damage] = {}
    count = progress("durable tier", sum(sizes.values()), silent=silent)
    for each in found:
        report(_checked(store, each, known, count))


def _checked(
    store: Store, each: DurableCheckpoint, known: dict[str, Content | Damage], count: Callable[[int], None]
) -> Checked:
    """Reads one checkpoint, of an alias its target; a save that has several names is read once."""
    name = each.name
    each = read(store, name) if isinstance(each.error, StoreNotFoundError) else each
    target = read(store, each.manifest.alias_of) if each.manifest is not None and each.manifest.alias_of else each
    manifest, error = (target.manifest, target.error) if target.is_there else (each.manifest, None)
    if manifest is None:
        # A checkpoint that can't be read is not known to be damaged, nor to be intact.
        state: CopyState = "newer" if is_other_format(error) else "damaged" if error is not None else "changed"
        return Checked(name, "durable", state, error=str(error or ""))
    save_id = manifest.content.save_id
    if save_id not in known:
        try:
            known[save_id] = content_or_damage(store, manifest, count)
        except StoreError as archived:
            if archived.reason != "archived":
                raise
            # Other checkpoints can still be read.
            known[save_id] = Damage(str(archived))
    damage = known[save_id]
    content = manifest.settled if isinstance(damage, Damage) else damage
    row = Checked(name, "durable", "intact", step=ids.known(content.step), size_bytes=content.size)
    if not isinstance(damage, Damage):
        return row
    if read(store, manifest.name).manifest != manifest:
        return replace(row, state="changed")
    damaged: CopyState = "gone" if damage.is_gone else "damaged"
    return replace(row, state=damaged, rank=damage.rank, file=damage.file or None, error=damage.error)


def _note(row: Checked) -> str:
    error = f"{row.file}: {row.error}" if row.file else row.error
    return ": ".join(filter(None, (_WHY.get(row.state, ""), error)))


_COPIES: dict[str, Literal["own", "replica", "spill"]] = {"memory": "own", "replicas": "replica", "spill": "spill"}
_WORDS = {"newer": "NEWER", "damaged": "DAMAGED", "gone": "GONE"}
_WHY = {"changed": "removed or overwritten while it was read", "newer": "it needs a newer release"}
_COLUMNS: Columns = {
    "state": lambda row: _WORDS.get(row.state, row.state),
    "tier": "tier",
    "name": "name",
    "rank": "rank",
    "copy": "copy",
    "note": _note,
}


# ------------------------------------------------------------------------------------------ get
#: So often a checkpoint is read that a run removes or overwrites meanwhile.
_TRIES = 3
Form = Literal["files", "torch", "safetensors"]
#: The forms of files by the suffix of TO.
_FORMS: dict[str, Form] = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
    ".safetensors": "safetensors",
}


@dataclass(frozen=True, kw_only=True)
class Get(Output, Address, Node):
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
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="For safetensors: only tensors of this prefix, without it; default state_dict."
        ),
    ] = None
    trust: Annotated[bool, typer.Option("--trust", help="Allow objects that may run code when loaded.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Replace files that exist.")] = False
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
        from tiered_checkpoint_io.export import folder_for

        # Removed by this thread: one that asks may still wait for its server when the command ends.
        with folder_for(self.to) if self.to is not None else contextlib.nullcontext() as folder:
            try:
                got = ask(config, _Fetch(config, wanted, self, folder).run)
            except BaseException:
                # It then has a moment to clear up.
                for thread in asking():
                    thread.join(GRACE_S)
                raise
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
    def form(self) -> Form:
        """The form, by the suffix of TO; a folder that exists gets the files as saved."""
        return "files" if self.to is None or self.to.is_dir() else _FORMS.get(self.to.suffix, "files")

    def _check(self) -> None:
        """Raises BadParameter for options that do not belong together."""
        if (self.to is None and self.yes) or (self.form != "safetensors" and self.prefix is not None):
            raise typer.BadParameter("--yes needs TO, and --prefix needs safetensors")
        if self.form != "files" and self.namespace is not None:
            raise typer.BadParameter(f"--namespace is not for {self.form}")


@dataclass(frozen=True, slots=True)
class Got:
    """A checkpoint that was fetched."""

    name: str
    dirpath: str
    step: int | None
    #: The namespace of node memory that has it; None for files.
    namespace: str | None
    #: The folder of its files as saved.
    folder: Path | None
    #: Bytes that were read; 0 if node memory had all of it.
    fetched_size_bytes: int
    #: The torch file, or safetensors.
    files: Sequence[File]


# ------------------------------------------------------------------------------------------- fetch
@dataclass(frozen=True, slots=True)
class _Fetch:
    """Fetches a checkpoint to node memory or files; every byte is verified."""

    config: TieredCheckpointConfig
    wanted: str
    options: Get
    #: For all files that are made.
    folder: Path | None

    def run(self, store: Store) -> Got:
        """Fetches the checkpoint; raises StoreError if a run removed or overwrote it, each time that it was read."""
        for left in reversed(range(_TRIES)):
            manifest = find(store, self.wanted)
            try:
                return self._fetched(store, manifest)
            except (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError) as error:
                if read(store, manifest.name).manifest == manifest:
                    raise
                if not left:
                    raise StoreError(
                        f"{manifest.name} was removed or overwritten while it was read",
                        operation="get",
                        key=ids.join_url(store.url, manifest.name),
                        hint="try again, or take one that the retention of its run keeps",
                        reason="changed",
                    ) from error
        raise AssertionError("unreachable")

    def _fetched(self, store: Store, manifest: Manifest) -> Got:
        errors: list[TieredCheckpointError] = []
        for content in contents_there(store, manifest):
            try:
                return self._content(store, manifest.name, content)
            except (CorruptCheckpointError, StoreNotFoundError, MemoryFullError) as error:
                errors.append(error)
        # The one without room may be the one that is intact.
        raise next((each for each in errors if isinstance(each, MemoryFullError)), errors[0])

    def _content(self, store: Store, name: str, content: Content) -> Got:
        from tiered_checkpoint_io.engine.trust import Trust
        from tiered_checkpoint_io.export import Source

        to, options, config, is_file = self.options.to, self.options, self.config, self.options.form != "files"
        parts = fetched = _parts(config, store, name, content)
        namespace, tier = None, None
        if to is None:
            # A restart looks only in the namespace of its job.
            namespace = options.namespace or content.namespace or config.namespace
            budget = node_budget(config.memory_allocation_percentage, config.memory_dir)
            tier = MemoryTier.open(config.memory_dir, namespace, budget_bytes=budget)
            tier.place = place_of(config)
            fetched = [part for part in parts if not _has(tier, part)]
        entries = [entry for part in fetched for entry in part.content.files]
        size = sum(entry.size for entry in entries)
        moved, question, show = moving(), current_question(), progress("get", size, silent=options.as_json)

        def count(amount: int) -> None:
            if question is not None and question.cancelled.is_set():
                raise StoreError("interrupted", operation="get", tier="durable", key=store.url)
            moved()
            show(amount)

        trust = Trust(weights_only=not options.trust)
        source = Source(store, name, content, entries, trust, config.read_concurrency(), count)
        if to is None:
            assert tier is not None
            with _slots(tier, fetched) as views:
                source.fetch(views)
        else:
            # The switch gets its name last.
            entries.sort(key=lambda each: each.basename == content.switch)
            self._to_files(source, to)
        files = [File(str(to), to.stat().st_size)] if is_file and to is not None else []
        folder = None if is_file else to
        return Got(name, config.dirpath, ids.known(content.step), namespace, folder, size, files)

    def _to_files(self, source: Source, to: Path) -> None:
        from tiered_checkpoint_io.export import give_names, refuse_existing, to_safetensors, to_torch_file

        options = self.options
        targets = [to / each.path for each in source.files] if options.form == "files" else [to]
        refuse_existing(targets, replace=options.yes)
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            folder = Path(made)
            if options.form == "files":
                files = source.fetch_to(folder)
            elif options.form == "torch":
                files = [to_torch_file(source, folder)]
            else:
                files = [to_safetensors(source, folder, prefix=options.prefix)]
            give_names(dict(zip(targets, files, strict=True)), replace=options.yes)


def _parts(config: TieredCheckpointConfig, store: Store, name: str, content: Content) -> list[Part]:
    """Returns the parts of a checkpoint, as memory holds them."""
    place, files = place_of(config), files_of(store, content)
    first = max(content.coordinator, 0) if content.parts == 1 else 0
    return [
        Part.found(name, rank, replace(content, files=files.of_rank(rank), index=None), place)
        for rank in range(first, first + content.parts)
    ]


def _has(tier: MemoryTier, part: Part) -> bool:
    """Returns True if memory has a part already, intact; a damaged one is quarantined."""
    moved = moving()
    for stored in tier.held():
        if (stored.save_id, stored.part.rank) == (part.save_id, part.rank):
            checked = check_part(held_part(tier, stored, ()), lambda _: moved())
            if checked.state == "damaged":
                tier.quarantine(stored.folder, checked.error or "")
            elif checked.state == "intact":
                return True
    return False


@contextlib.contextmanager
def _slots(tier: MemoryTier, parts: Sequence[Part]) -> Iterator[Mapping[str, memoryview]]:
    """Makes room in memory for the files of parts, which are committed if the block does not raise."""
    from tiered_checkpoint_io.engine.chunks import SlotDestination

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
