"""End of a process with work left for others: no wait is in vain, and no save is forgotten."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
from support.bad_input import KEPT, state
from support.waiting import until

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import SaveError, StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore

MEMORY_ONLY = {"tiers": ["memory"]}


@pytest.fixture
def broken(kept):
    """Makes the durable tier fail, and work again."""
    durable, away = Path(kept.options["dirpath"]), Path(kept.options["dirpath"]).with_name("away")

    class Broken:
        def fails(self):
            durable.rename(away)
            durable.write_text("no folder")

        def works(self):
            durable.unlink()
            away.rename(durable)

    return Broken()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("first", "drain", "rule"), [("save", "process", "warn"), ("delete", "thread", "raise")])
def test_what_waits_behind_a_failed_save_keeps_nobody(drain, first, rule, kept, broken):
    io = kept.io(drain=drain, on_save_error=rule, wait_timeout_s=600, memory_keep_last=5)
    io.save_checkpoint(state(2), "2.ckpt")
    if first == "delete":
        # One that could be carried out, and fails by itself.
        io.checkpointer.alias("last.ckpt", "2.ckpt")
        io.checkpointer.session.wait()
    broken.fails()
    io.checkpointer.save(state(3), "3.ckpt", wait=False)
    io.remove_checkpoint("2.ckpt")
    io.checkpointer.alias("last.ckpt", "3.ckpt")
    io.remove_checkpoint("last.ckpt")
    started, failed = time.monotonic(), pytest.raises(SaveError, match="did not reach the durable tier")
    with failed if rule == "raise" else contextlib.nullcontext():
        io.teardown()
    assert time.monotonic() - started < 20
    broken.works()
    assert (Path(kept.options["dirpath"]) / "2.ckpt").exists(), "what was good stays until what replaces it is good"
    io = kept.io(drain=drain, on_save_error="raise", wait_timeout_s=50)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 3
    io.checkpointer.session.wait()
    there = {path.name for path in Path(kept.options["dirpath"]).glob("*.ckpt")}
    assert there == {KEPT, "3.ckpt"}
    io.teardown()


def test_a_job_of_memory_alone_starts_no_drain_to_remove_something(tmp_path, memory_dir):
    io = TieredCheckpointIO(tmp_path / "never", memory_dir=memory_dir)
    io.save_checkpoint(state(1), "1.ckpt", storage_options=MEMORY_ONLY)
    io.remove_checkpoint("1.ckpt")
    assert not io.checkpointer.session.open().drain.pending()
    io.teardown()
    assert not (tmp_path / "never").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_of_saves_that_each_delete_the_one_before_the_newest_good_one_stays(how, kept, monkeypatch):
    """Lightning's own ModelCheckpoint calls its IO so, with ``save_top_k=1`` and ``on_save_error: warn``."""
    io = kept.io(drain="thread", max_pending=2, pending_timeout_s=1, memory_keep_last=9, on_save_error="warn")
    is_there, upload = threading.Event(), DirectoryStore.upload_if
    is_there.set()

    def upload_if(*arguments, **options):
        if how == "fails" and not is_there.is_set():
            raise StoreError("away", reason="unavailable")
        is_there.wait()
        return upload(*arguments, **options)

    def save(number):
        io.checkpointer.save(state(number), f"{number}.ckpt", wait=False)
        io.remove_checkpoint(f"{number - 1}.ckpt")

    def there():
        return {path.name for path in Path(kept.options["dirpath"]).glob("*.ckpt")} - {KEPT}

    monkeypatch.setattr(DirectoryStore, "upload_if", upload_if)
    save(2)
    io.checkpointer.session.wait()
    is_there.clear()
    for number in range(3, 8):
        save(number)
    assert there() == {"2.ckpt"}
    is_there.set()
    until(lambda: not io.checkpointer.session.open().drain.pending(), "all is done", timeout_s=40)
    # If the save that a delete follows is given up, or not queued, the old checkpoint stays.
    assert there() == ({"2.ckpt", "7.ckpt"} if how == "fails" else {"4.ckpt"})
    save(8)
    io.teardown()
    assert there() == ({"2.ckpt", "8.ckpt"} if how == "fails" else {"4.ckpt", "8.ckpt"})
