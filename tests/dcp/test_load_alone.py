"""Sharded checkpoints read back by one process: damaged, straight into tensors, without others' defects and costs."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fault_proxy import FaultProxy
from support.losing import lose_memory

from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = 300


def state(step):
    return {
        "a": torch.full((ROWS, 50), float(step)),
        "b": torch.arange(7) + step,
        "note": f"step {step}",
    }


def blank():
    return {"a": torch.zeros(ROWS, 50), "b": torch.zeros(7, dtype=torch.int64), "note": ""}


def is_step(loaded, step):
    return all(
        torch.equal(value, loaded[key]) if isinstance(value, torch.Tensor) else value == loaded[key]
        for key, value in state(step).items()
    )


@pytest.fixture
def config(memory_dir, tmp_path):
    return {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_the_latest_is_loaded_by_its_sentinel_and_an_unknown_one_lists_the_checkpoints(config, kind):
    for step in (1, 2):
        ours.async_save(state(step), checkpoint_id=f"step_{step}", kind=kind, **config).result()
    loaded = blank()
    ours.load(loaded, checkpoint_id="tiered:latest", kind=kind, **config)
    assert is_step(loaded, 2)
    for wrong in ("tiered://latest", "tiered:last"):
        with pytest.raises(ConfigError, match=f"'{wrong}' stands for no checkpoint .*allowed: tiered:latest, a na"):
            ours.load(blank(), checkpoint_id=wrong, kind=kind, **config)


def test_what_lies_in_folders_side_by_side_is_never_mixed_up(config):
    """Averaged weights of a training, and process groups that save into one dirpath."""

    def save(number, name, **more):
        ours.save(state(number), checkpoint_id=name, **config, **more)

    def load(**more):
        loaded = blank()
        reader = ours.load(loaded, **{**config, **more})
        return next(number for number in range(100) if is_step(loaded, number)), reader

    for step in (1, 2):
        save(10 + step, f"stage0/step_{step}")
    assert load()[0] == 12, "the only folder there is"
    for step in (1, 2):
        save(20 + step, f"stage1/step_{step}")
    for more in ({}, {"step": 2}, {"checkpoint_id": "tiered:latest"}):
        with pytest.raises(RestoreError, match=r"several folders.*: stage0, stage1 .*checkpoint_id='stage0/tiered:lat"):
            load(**more)
    assert load(checkpoint_id="stage1/tiered:latest")[0] == 22
    assert load(checkpoint_id=f"{config['dirpath']}/stage0/tiered:latest", step=1)[0] == 11
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint of step 3 in folder 'stage1'"):
        load(path="stage1/tiered:latest", step=3)
    save(31, "step_1")
    for step in (1, 2):
        save(40 + step, f"ema/step_{step}")
    assert load()[0] == load(step=1)[0] == 31
    with pytest.raises(CheckpointNotFoundError, match="checkpoint of step 2 "):
        load(step=2)
    # More of others' than are looked at first, and none in memory.
    for step in range(3, 40):
        save(50, f"ema/step_{step}", wait=False)
    load()[1].close()
    assert load(namespace="another-node")[0] == 31


def test_a_folder_that_plain_dcp_wrote_is_read_with_a_notice(config, caplog):
    import logging

    folder = Path(config["dirpath"], "theirs")
    dcp.save(state(5), storage_writer=dcp.FileSystemWriter(folder))
    loaded = blank()
    reader = ours.load(loaded, checkpoint_id=folder, logger=logging.getLogger("mine"), **config)
    assert is_step(loaded, 5)
    assert "nothing verified it" in caplog.text
    reader.close()


MIB = 1 << 20


def test_writers_and_readers_ask_s3_for_little_however_many_there_are(s3_url, s3_server, memory_dir):
    with FaultProxy(s3_server.endpoint_url) as proxy:
        config = {"dirpath": s3_url, "memory_dir": memory_dir, "endpoint_url": proxy.endpoint_url}
        saves = 5
        for step in range(saves):
            # One writer a save, as in the documents of such libraries.
            writer = TieredStorageWriter(**config, step=step, wait=True)
            dcp.save({"a": torch.full((1000,), float(step))}, storage_writer=writer)
        writer.close()
        assert not [target for _, target in proxy.requests if "location" in target.partition("?")[2]]
        # Of each rank: its file, its part's description, and the end of that. Of the checkpoint: a look
        # for all parts, what is there under this name, before the upload and before the commit, and what
        # the commit writes: .metadata and the manifest. Once: a LIST, and a look for unfinished uploads; and
        # the lease, which is written, listed, held, given back, and beats every 15 s.
        asked = len(proxy.requests)
        assert asked <= (3 + 8) * saves + 2 + 5, proxy.requests
        lose_memory(memory_dir)
        os.mkdir(memory_dir)
        loaded = {"a": torch.zeros(1000)}
        ours.load(loaded, **config).close()
        assert loaded["a"][0] == saves - 1
        assert len(proxy.requests) - asked <= 4 + saves, proxy.requests[asked:]


def resident():
    """Returns this process's own memory and its mapped tmpfs pages, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Rss")}
    return found["RssAnon"], found["RssShmem"]


@contextlib.contextmanager
def growth():
    """Yields a list; it holds afterwards by how much both kinds of memory grew at their peaks."""
    before, peak, ended, grown = resident(), [0.0, 0.0], threading.Event(), []

    def watch():
        while not ended.is_set():
            for kind, value in enumerate(resident()):
                peak[kind] = max(peak[kind], value - before[kind])
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()
        grown += peak


def test_a_save_and_a_load_take_no_memory_but_the_tiers_own(memory_dir, tmp_path):
    config = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
    state = {f"layer.{number}": torch.randn(MIB) for number in range(24)}
    size = 24 * 4
    writer = TieredStorageWriter(**config, wait=True)
    # Imports and the set-up at first use are not measured.
    dcp.save({"a": torch.zeros(3)}, checkpoint_id="step_1", storage_writer=writer)
    with growth() as saving:
        dcp.save(state, checkpoint_id="step_2", storage_writer=writer)
    writer.close()
    reader = TieredStorageReader(**config)
    with growth() as loading:
        dcp.load(state, storage_reader=reader)
    assert reader.opened.name == "step_2"
    reader.close()
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    reader = TieredStorageReader(**config)
    with growth() as fetching:
        dcp.load(state, storage_reader=reader)
    reader.close()
    for anonymous, _ in (saving, loading, fetching):
        assert anonymous < size / 4, "others take once to four times the state's size"
    # The slot, and the one that is made ready for the next save.
    assert saving[1] < 2.2 * size
    assert loading[1] < 1.1 * size
    assert fetching[1] < 1.1 * size
