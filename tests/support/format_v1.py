"""The fixtures of storage format 1, and how to put them where a test can load them; see their ``make.py``."""

import json
import os
import shutil
from pathlib import Path

from tiered_checkpoint_io.model.hashing import hash_bytes

DATA = Path(__file__).parents[1] / "data" / "format_v1"
#: The dirpath that the documents name.
PLACE = "/tiered-format-v1"
#: How a document of format 1 ends, around the digest of all that stands before. It is written down here for good: the
#: package may come to seal its documents in another way.
_SEAL, _END = b',\n "digest": "', b'"\n}'


def part_key(name, save_id, rank):
    """Where releases that wrote format 1 put the description of a part until its save was committed."""
    return f".tiered/parts/{name}/{save_id}/rank-{rank:05d}.json"


def moved(document, old, new):
    """A document that names another dirpath, sealed again."""
    text, _, digest = document.rpartition(_SEAL)
    assert digest == hash_bytes(text).encode() + _END
    assert json.loads(document)["dirpath"] == old
    told, telling = (f'"dirpath": {json.dumps(each)}'.encode() for each in (old, new))
    assert text.count(told) == 1
    text = text.replace(told, telling)
    return text + _SEAL + hash_bytes(text).encode() + _END


def put_in_place(kind, dirpath, memory_dir):
    """Copies both tiers to where they may be written to."""
    dirpath, memory_dir = Path(dirpath), Path(memory_dir)
    shutil.copytree(DATA / kind / "durable", dirpath, dirs_exist_ok=True)
    user = memory_dir / f"tiered-{os.getuid()}"
    shutil.copytree(DATA / kind / "memory", user / "default")
    # Git keeps no modes; memory is private.
    for path in (user, *user.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    for document in [*user.rglob("part.json"), *dirpath.glob(".tiered/parts/**/*.json")]:
        document.write_bytes(moved(document.read_bytes(), PLACE, str(dirpath)))
