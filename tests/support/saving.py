"""A full checkpoint put into a node's memory without a session: for tests of what happens to parts there."""

import time
from dataclasses import replace

from tiered_checkpoint_io.engine.retention import retain
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import FileEntry


def save_full(tier, capturer, state, name, save_id, step, *, keep_last=2, dirpath="s3://b/run", world_size=1):
    facts = SaveFacts(name, save_id, step, world_size, durable=False, payload="full", epoch=0, coordinator=0)
    place = Place(dirpath)
    image, rules = plan(state), facts.rules(0, place)
    slot = capturer.acquire(image.size, rules)
    hashes = capturer.fill(image, slot)
    files = (FileEntry(facts.path(0), image.size, image.chunk_size, hashes),)
    stored = tier.commit(facts.describe(0, place, files, created=time.time()), {facts.file_name(0): slot})
    retain(tier, tier.parts(), replace(rules, keep=keep_last))
    return stored
