"""What the uploads of a drain need not send, because the durable tier has it in an earlier checkpoint of the same rank.

The descriptions of both parts tell, by the hashes of their chunks: nothing is read or asked for that. It is
only a guess (see :class:`~tiered_checkpoint_io.stores.base.Delta`): what is known of earlier uploads may be wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.delta import same_ranges
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores.base import Delta, Store, UploadContent

#: So many parts of a rank are remembered: their descriptions hold a hash of each chunk.
_FORMS = 4


class Deltas:
    """The parts that were uploaded last, by rank, one of each form of names; and what was copied, by operation.

    A rank may save averages in turn with its weights, and one coordinator the checkpoints of several groups. A part of
    another form is the best guess where a name tells no form, as ``100`` does.
    """

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self._last: dict[tuple[Place, int, int], dict[str, Part]] = {}
        self._copied: Counter[str] = Counter()

    def contents(self, part: Part, views: Mapping[str, memoryview]) -> Mapping[str, UploadContent]:
        """What to upload of a part whose files' bytes are these, by their basenames."""
        last = self._last.get(_writer(part)) or self._in_memory(part)
        base = last.get(ids.loose_form_of(part.name)) or next(reversed(last.values()), None)
        if base is None or base.save_id == part.save_id:
            return views
        contents: dict[str, UploadContent] = dict(views)
        for entry in part.content.files:
            same = same_ranges(entry, base.content.files)
            if same:
                contents[entry.basename] = Delta(views[entry.basename], same)
        return contents

    def uploaded(self, part: Part) -> None:
        """Notes that the durable tier has a part."""
        writer, form = _writer(part), ids.loose_form_of(part.name)
        if writer not in self._last:
            self._last[writer] = dict(list(self._in_memory(part).items())[-_FORMS:])
        last = self._last[writer]
        last.pop(form, None)
        last[form] = part
        if len(last) > _FORMS:
            del last[next(iter(last))]

    @contextlib.contextmanager
    def counting(self, store: Store, op_id: str) -> Iterator[None]:
        """Counts what is copied while the block runs for an operation; see :meth:`copied`."""
        before = store.metrics.snapshot().get("bytes.copied", 0)
        try:
            yield
        finally:
            self._copied[op_id] += store.metrics.snapshot().get("bytes.copied", 0) - before

    def copied(self, op_id: str) -> int:
        """The bytes that were copied for an operation that has ended; given once."""
        return self._copied.pop(op_id, 0)

    def _in_memory(self, part: Part) -> dict[str, Part]:
        """The same of what an earlier drain has uploaded, as far as memory still has it."""
        parts = [each.part for each in self._tier.parts() if each.drained and each.part.durable and not each.is_replica]
        ours = [each for each in parts if _writer(each) == _writer(part)]
        found: dict[str, Part] = {}
        for each in sorted(ours, key=lambda each: each.save_id):
            # The newest is the last.
            found.pop(form := ids.loose_form_of(each.name), None)
            found[form] = each
        return found


def _writer(part: Part) -> tuple[Place, int, int]:
    return part.place, part.content.coordinator, part.rank
