"""Stories of nodes and storage, over each kind of checkpoint; see :mod:`test_stories`, which has the table."""

# ruff: noqa: F811 - a fixture of another module is an argument here

import contextlib
import re
from pathlib import Path

import pytest
from support.clocks import hurried
from support.failing import failing
from support.fault_proxy import FaultProxy, refuse
from support.restoring import flip
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError, SaveError

from .kinds import KINDS, lose_memory
from .test_stories import LARGE, LATEST, dirpath, kind, on_a_directory, on_s3, start  # noqa: F401 - fixtures


def test_a_run_that_goes_back_is_newer_than_the_one_before_it(start, memory_dir):
    """A run on one node, a second one on another node that goes back, and a third one on the first node."""
    other = Path(memory_dir, "other")
    other.mkdir()
    start().save(5)
    job = start(memory_dir=str(other))
    assert job.load(LATEST) == 5
    job.save(3)
    assert start().load(LATEST) == 3


@pytest.fixture
def small(tmp_path):
    """Yields a node's memory of 4 MiB, of which the operation log takes 2."""
    with mounted_tmpfs(tmp_path / "small", 6 << 20) as folder:
        yield str(folder)


def test_a_durable_save_that_memory_has_no_room_for(small, start, memory_dir):
    options = {"memory_dir": small, "spill_dir": "auto"}
    job = start(**options)
    job.save(1, wait=False, size=LARGE)
    save = job.last_save()
    assert (save.tiers, save.queued, save.spilled) == ({"memory", "durable"}, True, True)
    job.wait()
    job.save(2, size=LARGE)
    job.close()
    assert start(**options).load(LATEST, LARGE) == 2
    # The node is lost, and all that it had.
    job = start(memory_dir=memory_dir)
    assert [job.load(which, LARGE) for which in (LATEST, "step_1.ckpt")] == [2, 1]


def test_a_durable_save_that_neither_memory_nor_a_spill_has_room_for_fails(tmp_path, start, memory_dir, kind):
    rule = "warn" if kind == "sharded" else "raise"
    with mounted_tmpfs(tmp_path / "memory", 8 << 20) as folder:
        job = start(memory_dir=str(folder), spill_dir=None, on_save_error=rule)
        job.save(1)
        with pytest.raises(SaveError, match="name a spill_dir") if rule == "raise" else contextlib.nullcontext():
            job.save(2, size=LARGE)
        (said,) = {text for text in job.messages.said if "saving step_2.ckpt failed" in text}
        assert re.search(r"the budget and the node's free memory allow [0-9]+ .*name a spill_dir", said)
        assert job.engine.session.counts["failed"] == 1
        assert job.load(LATEST) == 1
        job.save(3)
        job.close()
        assert start(memory_dir=memory_dir).load(LATEST) == 3


def test_a_spilled_save_that_waits_is_found_by_the_next_start_even_after_a_reboot(small, start, memory_dir):
    hasty = {"memory_dir": small, "on_save_error": "warn", "wait_timeout_s": 1}
    job = start(**hasty)
    with job.without_drain():
        for number in (1, 2):
            job.save(number, wait=False, size=LARGE)
        job.has_to_end()
        job = start(**hasty)
        assert job.load(LATEST, LARGE) == 2
        job.has_to_end()
        job.close()
    # Memory is gone, and the log with it.
    with mounted_tmpfs(small, 4 << 20):
        job = start(memory_dir=small)
        assert job.load(LATEST, LARGE) == 2
        job.wait()
        job.close()
    job = start(memory_dir=memory_dir)
    assert [job.load(which, LARGE) for which in (LATEST, "step_1.ckpt")] == [2, 1]


@on_a_directory
def test_a_step_of_memory_alone_that_does_not_fit_is_skipped_unless_a_folder_is_named(small, start, tmp_path):
    job = start(memory_dir=small)
    job.save(1, durable=False)
    for number in (2, 3):
        job.save(number, durable=False, size=LARGE)
    said = [text for text in job.messages.said if "steps of memory alone are skipped" in text]
    assert len(said) == 1, job.messages.said
    assert job.engine.session.counts["skipped"] == 2
    assert start(memory_dir=small).load(LATEST) == 1
    (tmp_path / "named").mkdir()
    job = start(memory_dir=small, spill_dir=str(tmp_path / "named"))
    job.save(4, durable=False, size=LARGE)
    assert start(memory_dir=small, spill_dir=str(tmp_path / "named")).load(LATEST, LARGE) == 4


@pytest.fixture
def proxy(s3_server):
    """Yields S3 that may be away, and clients that find that out soon."""
    quick = hurried(
        retry_deadline_s=0.5, retry_first_wait_s=0.05, retry_max_wait_s=0.2, redo_first_s=0.05, redo_max_s=0.2
    )
    with quick, FaultProxy(s3_server.endpoint_url) as proxy:
        yield proxy


@on_s3
def test_while_s3_is_away_an_empty_memory_is_no_start_from_scratch(start, proxy, memory_dir):
    away = {"endpoint_url": proxy.endpoint_url}
    start(**away).save(1)
    start().close()
    lose_memory(memory_dir)
    proxy.plan = lambda *_: refuse(503, "SlowDown")
    with failing("unavailable"):
        start(**away).load(LATEST)


# --------------------------------------------------------------------------------------- what is said
@on_a_directory
@pytest.mark.parametrize("kind", ["full"], indirect=True)
def test_the_end_of_a_queued_upload_is_in_the_log_of_the_job(start, dirpath):
    job = start(drain="process")
    job.save(1, wait=False)
    job.wait()
    job.engine.session.poll()
    (said,) = [each for each in job.messages.said if "is durable" in each]
    assert f"step_1.ckpt is durable on {dirpath}: " in said


@on_a_directory
def test_a_save_is_not_called_durable_before_it_is(start):
    job = start()
    with job.without_drain():
        job.save(1, wait=False)
        said = [each for each in job.messages.said if "saved" in each]
        assert said
        assert not [each for each in said if "to durable" in each]
        assert "upload" in said[-1]
        assert "queued" in said[-1]
    job.wait()


@pytest.mark.parametrize("kind", ["sharded", "local"], indirect=True)
def test_another_job_below_one_base_path_does_not_resume_from_this_one(kind, s3_url, memory_dir):
    options = {"s3_tier_base_path": s3_url, "memory_dir": memory_dir, "drain": "thread"}
    job = KINDS[kind](**{**options, "namespace": "one"})
    job.save(1)
    job.close()
    other = KINDS[kind](**{**options, "namespace": "two"})
    try:
        with pytest.raises(CheckpointNotFoundError):
            other.load(LATEST)
    finally:
        other.close()


@pytest.mark.parametrize("kind", ["full", "sharded"], indirect=True)
@pytest.mark.parametrize("own", ["new", pytest.param("", marks=pytest.mark.matrix)], ids=["beside", "above"])
def test_a_checkpoint_of_another_run_is_verified_whatever_folders_its_name_has(start, dirpath, memory_dir, own):
    """A URL does not show which of the folders above the file is that run's dirpath."""
    job = start(dirpath=f"{dirpath}/old", namespace="one")
    job.save(1, "best/step_1.ckpt")
    job.alias("best/last.ckpt", "best/step_1.ckpt")
    job.save(2, "best/step_2.ckpt", durable=False)
    job.wait()
    other = {"dirpath": f"{dirpath}/{own}".rstrip("/"), "namespace": "one"}
    urls = [f"{dirpath}/old/best/{name}.ckpt" for name in ("step_1", "last", "step_2")]
    job = start(**other)
    assert [job.load(url) for url in urls] == [1, 1, 2]
    assert not [line for line in job.messages.said if "has no manifest" in line]
    job.close()
    lose_memory(memory_dir)
    job = start(**other)
    assert [job.load(url) for url in urls[:2]] == [1, 1]
    with pytest.raises(CheckpointNotFoundError):
        job.load(urls[2])


@on_a_directory
@pytest.mark.parametrize("kind", ["full", "sharded"], indirect=True)
def test_a_damaged_checkpoint_of_another_run_is_never_loaded_as_one_that_nothing_verifies(start, dirpath, memory_dir):
    job = start(dirpath=f"{dirpath}/old")
    job.save(1, "best/step_1.ckpt", size=1 << 15)
    job.close()
    lose_memory(memory_dir)
    for path in Path(dirpath, "old", "best").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            flip(path, 1 << 15)
    with pytest.raises(RestoreError, match="intact"):
        start(dirpath=f"{dirpath}/new").load(f"{dirpath}/old/best/step_1.ckpt", 1 << 15)
