"""Defects and costs of other storage for torch.distributed.checkpoint, which must not occur here."""

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

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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


# ---------------------------------------------------------------------------------- resident memory
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
