"""Parts in node memory, without a session: saved, read and listed."""

from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part

RUN = ids.new_run_id()


def part_of(data, number, *, durable=False):
    entry = FileEntry(f"step={number}.ckpt", len(data), 16 << 20, (hash_bytes(data),))
    content = Content(ids.save_id(RUN, number), number, 0, "full", 1.0, 1, {}, (entry,), switch=entry.basename)
    return Part(entry.path, 0, content, "d", durable)


def save(tier, data, number, **options):
    slot = tier.acquire(len(data))
    with slot.view as view:
        view[: len(data)] = data
    part = part_of(data, number, **options)
    return tier.commit(part, {part.content.files[0].basename: slot})


def content_of(tier, stored):
    with reading(stored) as views:
        return bytes(views[stored.part.content.files[0].basename])


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
