"""The same stories of checkpoints, over each kind, and over a directory and a real S3 server as the durable tier.

Each story is written once, over :class:`kinds.Job`. Some kinds lack some stories:

=================================  ====  =======  =====  ==============================================================
story                              full  sharded  local  why not
=================================  ====  =======  =====  ==============================================================
save, resume, latest, by name      yes   yes      yes
``tiered:last`` (queued, landed)   yes   yes      no     ``dcp.load`` takes no sentinels; an alias loads by its name
overwrite, delete                  yes   yes      yes
alias of a deleted target          yes   yes      yes
newer format, corrupt copies       yes   yes      yes
two runs, memory too small         yes   yes      yes
another namespace, one base path   no    yes      yes    ``s3_tier_base_path`` is the SageMaker library's word, for dcp
S3 away                            yes   yes      yes    over S3 alone: a directory is never away
=================================  ====  =======  =====  ==============================================================
"""

import contextlib
import os
import time
from pathlib import Path

import pytest
from support.failing import failing
from support.restoring import flip, of_a_newer_release
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError

from .kinds import KINDS, lose_memory

#: In elements: some 8 MB, for a node of 4 MiB.
LARGE = 2_000_000
LATEST, LAST = "tiered:latest", "tiered:last"
#: For stories only in memory, and stories that change files of the durable tier.
on_a_directory = pytest.mark.parametrize("dirpath", ["directory"], indirect=True)
on_s3 = pytest.mark.parametrize("dirpath", ["s3"], indirect=True)
#: ``save_last=True`` and ``save_last="link"``; of several files there is no copy, so that both are an alias.
as_copy_or_alias = pytest.mark.parametrize("copy", [True, pytest.param(False, marks=pytest.mark.matrix)])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.matrix)])
def dirpath(request):
    return request.getfixturevalue("s3_url" if request.param == "s3" else "durable_dir")


@pytest.fixture
def start(kind, dirpath, memory_dir):
    """Starts a process of the job; those that run are closed first, as on a restart."""
    running = []

    def start(**options):
        close()
        running.append(KINDS[kind](**{"dirpath": dirpath, "memory_dir": memory_dir, **options}))
        return running[-1]

    def close():
        while running:
            running.pop().close()

    yield start
    close()


# --------------------------------------------------------------------------------- saving and resuming
def test_a_start_without_any_checkpoint_finds_none(start, kind):
    job = start()
    if kind == "full":
        assert job.load(LATEST) == 0
    else:
        with pytest.raises(CheckpointNotFoundError):
            job.load(LATEST)
    with pytest.raises(CheckpointNotFoundError):
        job.load("step_1.ckpt")


@on_a_directory
def test_the_newest_is_resumed_from_memory_and_each_loads_by_its_name(start):
    job = start()
    for number in (1, 2):
        job.save(number, durable=False)
    job = start()
    assert [job.load(which) for which in (LATEST, "step_1.ckpt", "step_2.ckpt")] == [2, 1, 2]


def test_a_node_that_lost_its_memory_resumes_from_the_durable_tier(start, memory_dir):
    job = start()
    job.save(1)
    job.save(2, wait=False)
    job.wait()
    job.save(3, durable=False)
    job.close()
    lose_memory(memory_dir)
    assert [start().load(which) for which in (LATEST, "step_1.ckpt")] == [2, 1]


@as_copy_or_alias
@pytest.mark.parametrize("landed", [True, False], ids=["landed", "queued"])
def test_last_is_what_its_alias_means_though_that_is_still_queued(start, kind, landed, copy):
    if kind == "local":
        pytest.skip("dcp.load takes no sentinels")
    job = start()
    with contextlib.nullcontext() if landed else job.without_drain():
        for number in (1, 2):
            job.save(number, wait=landed)
        job.alias("last.ckpt", "step_1.ckpt", copy=copy)
        if landed:
            job.wait()
        assert job.load(LAST) == 1
    job.wait()
    assert job.load("last.ckpt") == 1


@as_copy_or_alias
def test_an_alias_loads_by_its_name_once_it_has_landed(start, memory_dir, copy):
    job = start()
    for number in (1, 2):
        job.save(number)
    job.alias("last.ckpt", "step_1.ckpt", copy=copy)
    job.close()
    lose_memory(memory_dir)
    assert start().load("last.ckpt") == 1


# ------------------------------------------------------------------------------------ changing a name
def test_an_overwritten_name_has_the_new_content_in_each_tier(start, memory_dir):
    job = start()
    for number in (1, 2):
        job.save(number, "step_1.ckpt")
    job = start()
    assert job.load("step_1.ckpt") == 2
    job.close()
    lose_memory(memory_dir)
    assert [start().load(which) for which in ("step_1.ckpt", LATEST)] == [2, 2]


def test_a_deleted_name_is_gone_from_each_tier(start, memory_dir):
    job = start()
    for number in (1, 2):
        job.save(number)
    job.delete("step_2.ckpt")
    job.wait()
    for lost in (False, True):
        job.close()
        if lost:
            lose_memory(memory_dir)
        job = start()
        with pytest.raises(CheckpointNotFoundError):
            job.load("step_2.ckpt")
        assert job.load(LATEST) == 1


@pytest.mark.parametrize("deleted", ["all", "files", "one file"])
def test_all_nodes_pass_by_what_its_owner_deleted_until_it_is_uploaded_again(start, memory_dir, tmp_path, deleted):
    job = start()
    for number in (1, 2):
        job.save(number)
    store, dirpath = job.engine.session.durable(), job.options["dirpath"]
    keys = [each.key for each in (*store.list("step_2.ckpt"), *store.list(".tiered/manifests/step_2.ckpt"))]
    for key in {"all": keys, "files": keys[:-1], "one file": keys[-2:-1]}[deleted]:
        store.delete(key)

    def says(*words):
        return CliRunner().invoke(app, [*words, "--memory-dir", memory_dir])

    assert (job.load(LATEST), job.load("step_2.ckpt")) == (1, 2)
    other, listed = str(tmp_path), says("ls", dirpath).stdout
    assert [line.split()[0] for line in listed.splitlines() if "latest" in line] == ["step_1.ckpt"]
    assert start(memory_dir=other).load(LATEST) == 1
    if deleted != "all":
        with pytest.raises(RestoreError, match="no such object .*deleted by hand.*`tiered-ckpt flush step_2.ckpt"):
            start(memory_dir=other).load("step_2.ckpt")
        assert "its files are gone" in listed
        assert "GONE\tdurable\tstep_2.ckpt" in (out := says("verify", dirpath).stdout) and "DAMAGED" not in out
        assert "there is no such object" in str(says("get", dirpath, "step_2.ckpt", other).exception)
    assert says("flush", "step_2.ckpt", "--namespace", job.root.name).exit_code == 0
    assert start(memory_dir=other).load(LATEST) == 2


@on_a_directory
def test_a_file_that_its_owner_edited_is_refused_by_its_name(start, dirpath, memory_dir, tmp_path):
    start().save(1)
    path = max(
        (each for each in Path(dirpath).rglob("step_1.ckpt*/*") if each.suffix in (".distcp", ".pt")), default=None
    )
    path = path or Path(dirpath, "step_1.ckpt")
    saved, after = path.read_bytes(), time.time() + 60
    flip(path)
    os.utime(path, (after, after))
    for memory in (memory_dir, str(tmp_path)):
        with pytest.raises(
            RestoreError, match="step_1.ckpt was changed after it was saved: .* copy it to another name"
        ):
            start(memory_dir=memory).load("step_1.ckpt")
    # With the saved bytes, as after a copy of the whole folder, the times say nothing.
    path.write_bytes(saved)
    os.utime(path, (after, after))
    assert start().load("step_1.ckpt") == 1


@as_copy_or_alias
def test_a_copy_outlives_its_target_and_an_alias_goes_with_it(start, memory_dir, copy):
    """The durable tier copies one file by itself: of a sharded checkpoint it makes an alias."""
    job = start()
    for number in (1, 2):
        job.save(number)
    job.alias("last.ckpt", "step_1.ckpt", copy=copy)
    job.delete("step_1.ckpt")
    job.wait()
    job.close()
    lose_memory(memory_dir)
    job = start()
    if copy and not hasattr(job, "kind"):
        assert job.load("last.ckpt") == 1
    else:
        with pytest.raises(CheckpointNotFoundError):
            job.load("last.ckpt")
    assert job.load(LATEST) == 2


# --------------------------------------------------------------------------------------------- damage
@on_a_directory
@pytest.mark.parametrize("where", ["memory", "durable"])
def test_a_newest_of_a_newer_release_is_an_error(start, dirpath, memory_dir, where):
    job = start()
    for number in (1, 2):
        job.save(number)
    newest = job.documents()[-1]
    job.close()
    if where == "durable":
        lose_memory(memory_dir)
        newest = Path(dirpath, ".tiered", "manifests", "step_2.ckpt.json")
    newest.write_bytes(of_a_newer_release(newest.read_bytes(), version=99))
    with failing("format", match="upgrade"):
        start().load(LATEST)


@pytest.mark.parametrize("durable", [True, False])
def test_a_corrupt_newest_gives_way_to_its_durable_copy_or_to_the_one_before(start, durable):
    job = start()
    for number in (1, 2):
        job.save(number, durable=durable)
    corrupt(job.files()[-1])
    assert start().load(LATEST) == (2 if durable else 1)


@on_a_directory
def test_the_only_copy_is_corrupt_at_each_start(start):
    job = start()
    job.save(1, durable=False)
    corrupt(job.files()[-1])
    for _ in range(2):
        with pytest.raises(RestoreError):
            start().load(LATEST)


def corrupt(path):
    flip(path, at=path.stat().st_size - 700 if path.suffix == ".distcp" else path.stat().st_size // 2)
