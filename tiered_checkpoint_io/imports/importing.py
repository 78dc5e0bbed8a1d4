"""Commits checkpoints that others wrote, bytes unchanged, to a durable tier."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch

from tiered_checkpoint_io.adapters.storage_options import OPTIMIZERS, is_resumable
from tiered_checkpoint_io.engine.chunks import hashed
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.files import files_of, paths_in
from tiered_checkpoint_io.engine.durable.manifests import contents_of, exists, newest_save_id, read_manifest
from tiered_checkpoint_io.engine.durable.removal import withdraw
from tiered_checkpoint_io.engine.save.facts import position, versions
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError, TieredCheckpointError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.safe_pickle import parse
from tiered_checkpoint_io.imports.layouts import ForeignCheckpoint, Imported, by_name, shard_name
from tiered_checkpoint_io.imports.reading import Hashed, Source, weights_in
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Manifest, Part
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores.base import Store, UploadContent

#: What can be done where a name is taken.
_BY_FORCE = "give --force to replace it"
_BY_NAME = "its files can't be replaced, as this one's have the same names; import it alone, with another --name"
_ALONE = "import it alone, with another --name"
#: Where a training state of others tells how far it is.
_STEPS = ("global_step", "step", "epoch")
#: How Lightning's sharded strategies name each optimizer's states among the shards.
_OPTIMIZER = "optimizer_"


def import_checkpoints(
    source: Store,
    found: list[ForeignCheckpoint],
    target: Store,
    place: Place,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    done: Callable[[Imported], None] = lambda _: None,
) -> list[Imported]:
    """Commits checkpoints that others wrote, in the order of their steps; the last one is then the newest of the tier.

    Those that an earlier import of the same files made are left as they are: an import that was interrupted can be
    repeated. No one else may write to the durable tier meanwhile, so the caller holds its lease.

    Args:
        source: Where they are.
        found: What :func:`layouts.find` found there.
        target: The durable tier.
        place: Where that is.
        force: Replace what has their names already; of those that get one name, only one is imported all the same.
        progress: Called with the bytes that were hashed or sent, from any thread; what it raises ends the work, and
            nothing is left of the checkpoint that was in work.
        done: Called with each once it is done.

    Raises:
        StoreError: A store could not be asked.
    """
    run = ids.new_run_id(after=newest_save_id(target))
    named = by_name(found)
    made: list[Imported] = []
    for number, each in enumerate(_in_order(source, found), 1):
        kind: Literal["full", "sharded"] = "full" if each.layout in ("torch", "nemo") else "sharded"
        try:
            if named[each.name] is each:
                save_id = ids.save_id(run, number)
                imported = _import(source, each, target, place, save_id, force=force, progress=progress)
            else:
                text = f"{each.origin} would get the name of {named[each.name].origin}"
                imported = Imported(each.name, "exists", kind, error=text, hint=_ALONE)
        except StoreNotFoundError as error:
            imported = Imported(each.name, "failed", kind, error=error.message)
        except StoreError:
            raise
        except TieredCheckpointError as error:
            imported = Imported(each.name, "failed", kind, error=str(error))
        # Behind one that is made now, it would not be in order.
        if imported.earlier and any(before.state == "imported" and not before.earlier for before in made):
            hint = _BY_FORCE if kind == "full" else _BY_NAME
            text = "an earlier import made it, before those above"
            imported = Imported(each.name, "exists", kind, error=text, hint=hint)
        done(imported)
        made.append(imported)
    return made


def _in_order(source: Store, found: list[ForeignCheckpoint]) -> list[ForeignCheckpoint]:
    """The same by their steps: also of files whose names tell none, such as last.ckpt, which mostly is the newest.

    Averages come before the weights of their step, as a run saves them, though NeMo writes them later.
    """

    def order(each: ForeignCheckpoint) -> tuple[int, bool, float, str]:
        return _step_of(source, each), not ids.is_companion(each.name, ids.EMA), each.modified, each.name

    return sorted(found, key=order)


def _step_of(source: Store, found: ForeignCheckpoint) -> int:
    basename = found.told_by
    # NeMo's archives hold weights alone.
    if found.step is not None or found.layout == "nemo" or basename is None:
        return -1 if found.step is None else found.step
    try:
        key = found.files[basename]
        return position(_outline(Source(source, key, source.size(key))), found.name)[0]
    except StoreError as error:
        if isinstance(error, StoreNotFoundError):
            return -1
        raise
    except TieredCheckpointError:
        # Told when it is to be imported.
        return -1


def _import(
    source: Store,
    found: ForeignCheckpoint,
    target: Store,
    place: Place,
    save_id: str,
    *,
    force: bool,
    progress: Callable[[int], None],
) -> Imported:
    is_full = found.layout in ("torch", "nemo")
    kind: Literal["full", "sharded"] = "full" if is_full else "sharded"
    name = ids.validate_new_name(found.name)
    paths = {basename: name if is_full else f"{name}/{basename}" for basename in found.files}
    if not force and (made := _made_earlier(source, found, target, name, kind)) is not None:
        return made
    old = read_manifest(target, name)
    # The bytes of a sharded one tell the names of its files, which are those of another one's.
    is_held = not is_full and old is not None and not _own_names(target, old).isdisjoint(paths.values())
    if old is not None and (is_held or not force):
        hint = _BY_NAME if is_held else _BY_FORCE
        return Imported(name, "exists", kind, error="a checkpoint of this name is there", hint=hint)
    # Of an import that was killed, or others'.
    there = {path for path in _new_paths(source, found, target, paths) if exists(target, path)}
    files: dict[str, UploadContent] = {}
    for basename, key in found.files.items():
        files[basename] = Source(source, key, source.size(key))
    if found.layout == "nemo":
        (basename,) = files
        files = {basename: weights_in(_source(files[basename]), source)}
    names: set[str] = set()
    if not is_full:
        files[METADATA], names = _metadata(found, files)
    step, epoch, resumable = _facts(found, files, names)
    sizes = {} if force else {path: target.size(path) for path in there}
    taken = [paths[basename] for basename, data in files.items() if sizes.get(paths[basename], len(data)) != len(data)]
    entries = tuple(hashed(paths[each], data, progress=progress) for each, data in files.items() if not taken)
    taken += [each.path for each in entries if each.path in sizes and not _is_there(target, each, progress)]
    if taken:
        text = f"a file that no manifest names is there: {taken[0]}"
        return Imported(name, "exists", kind, error=text, hint=_BY_FORCE)
    content = Content(
        save_id=save_id,
        step=step,
        epoch=epoch,
        kind=kind,
        created=found.modified,
        world_size=1,
        writer=versions(),
        files=entries,
        parts=1,
        coordinator=0,
        switch=name.rpartition("/")[2] if is_full else METADATA,
        resumable=resumable,
    )
    part = Part(name, 0, content, place.dirpath, durable=True, server=place.server)
    for entry in entries:
        data = files[entry.basename]
        files[entry.basename] = Hashed(data, entry) if isinstance(data, Source) else data
    fate: commit.Fate | None = None
    try:
        fate = commit.commit(target, part, files, progress=progress)
    finally:
        if fate in (None, "replaced"):
            sent = set(_new_paths(source, found, target, paths)) - there
            switch = name if is_full else f"{name}/{METADATA}"
            # The lease is held.
            withdraw(target, name, save_id, sent, switch=switch, keep=set(paths.values()) - sent, alone=True)
    if fate == "replaced":
        return Imported(name, "exists", kind, error="a later save has taken its name meanwhile")
    return Imported(name, "imported", kind, ids.known(step), content.resumable, content.size)


def _made_earlier(
    source: Store, found: ForeignCheckpoint, target: Store, name: str, kind: Literal["full", "sharded"]
) -> Imported | None:
    """What an earlier import made of the same files, by their time and size; None where it is another's, or none."""
    manifest = read_manifest(target, name)
    if manifest is None or manifest.alias_of is not None or manifest.previous:
        return None
    content = manifest.content
    if (content.kind, content.created) != (kind, found.modified):
        return None
    sizes = {path.rpartition("/")[2]: size for path, size in files_of(target, content).sizes.items()}
    for basename, key in found.files.items():
        size = source.size(key)
        if found.layout == "nemo":
            size = len(weights_in(Source(source, key, size), source))
        # The metadata of the SageMaker library is written anew.
        if sizes.get(basename) != size and not (found.layout == "sagemaker" and basename == METADATA):
            return None
    return Imported(name, "imported", kind, ids.known(content.step), content.resumable, content.size, earlier=True)


def _own_names(target: Store, manifest: Manifest) -> set[str]:
    """The files of a checkpoint that a save of the same name must not write to: all but the one that changes over."""
    contents = contents_of([manifest])
    return (paths_in(target, contents) or set()) - {each.switch_path(manifest.name) for each in contents}


def _is_there(target: Store, entry: FileEntry, progress: Callable[[int], None]) -> bool:
    """Whether a file that is there has the same bytes."""
    there = Source(target, entry.path, target.size(entry.path))
    # These are not counted.
    return hashed(entry.path, there, progress=lambda _: progress(0)) == entry


def _new_paths(source: Store, found: ForeignCheckpoint, target: Store, paths: Mapping[str, str]) -> list[str]:
    """The files that are made: those that lie where they are imported to are taken as they are."""
    places = {path: ids.join_url(source.url, found.files[basename]) for basename, path in paths.items()}
    return [path for path, place in places.items() if place != ids.join_url(target.url, path)]


def _source(data: UploadContent) -> Source:
    assert isinstance(data, Source)
    return data


def _facts(
    found: ForeignCheckpoint, files: Mapping[str, UploadContent], names: Collection[str]
) -> tuple[int, int, bool]:
    """Step, epoch, and whether training can resume from it; nothing in it is run.

    Args:
        found: The checkpoint.
        files: Its files, by their basenames.
        names: Of a sharded one, those of its tensors and objects.

    Raises:
        CorruptCheckpointError: As :func:`_outline`.
    """
    if found.told_by is None:
        # Nothing tells more than its name.
        return found.step if found.step is not None else -1, -1, True
    held = _outline(_source(files[found.told_by]))
    state = held if isinstance(held, dict) else {}
    step, epoch = position(state, found.name)
    if found.layout != "dcp":
        is_whole = found.layout == "torch" and any(key in state for key in (*OPTIMIZERS, *_STEPS))
        return step, epoch, is_whole and is_resumable(state, found.name)
    # As it was before Lightning moved the model and the optimizers to the shards.
    state = {**state, "state_dict": {}}
    if any(each.startswith(_OPTIMIZER) for each in names):
        state["optimizer_states"] = [True]
    return step, epoch, is_resumable(state, found.name)


def _outline(source: Source) -> Any:
    """What a file of torch.save holds, as data, see :func:`.parse`.

    Raises:
        CorruptCheckpointError: It is no such file, or of the format that torch wrote before release 1.6.
    """
    try:
        with source.opened() as file:
            pickled = torch._C.PyTorchFileReader(file).get_record("data.pkl")
        return parse(pickled)[0]
    except TieredCheckpointError:
        raise
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CorruptCheckpointError(
            "not a file that torch.save writes since torch 1.6",
            operation="import",
            key=source.key,
            hint="load an older one by torch.load, and save it again",
        ) from error


def _metadata(found: ForeignCheckpoint, files: Mapping[str, UploadContent]) -> tuple[memoryview, set[str]]:
    """``.metadata`` of a sharded checkpoint and what it names, after a look whether all of that is there.

    Raises:
        CorruptCheckpointError: It is missing or damaged, or a file is missing or too short.
    """
    if METADATA not in files:
        raise CorruptCheckpointError(
            "it has no metadata: its save did not end", operation="import", key=next(iter(found.files.values()))
        )
    with files[METADATA][0 : len(files[METADATA])] as view:
        data = bytes(view)
    where = found.files[METADATA]
    metadata = parse_metadata(data, tier="durable", where=where, shard_name=shard_name)
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for path, end in sorted(ends.items()):
        if path not in files or len(files[path]) < end:
            size = f"has {len(files[path])} bytes" if path in files else "is missing"
            raise CorruptCheckpointError(f"{path} {size}; {end} were expected", operation="import", key=where)
    names = set(metadata.state_dict_metadata)
    if found.layout != "sagemaker":
        return memoryview(data), names
    # The path that it was saved to is another class here than where it was written.
    metadata.storage_meta = None
    return memoryview(pickle.dumps(metadata)), names
