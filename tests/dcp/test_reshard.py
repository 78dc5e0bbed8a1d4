"""Checkpoints written anew as another number of parts: stock DCP, our restore and a training read what was saved."""

import json
import os
import shutil
from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.documented import document_of
from support.losing import lose_memory
from support.restoring import flip
from support.supporting import build
from support.tenants import refuse
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, find_latest
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.chunks import fetch_chunk
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import Manifests, read_manifest
from tiered_checkpoint_io.errors import CorruptCheckpointError, ExportError, StoreError, UsageError
from tiered_checkpoint_io.export import folder
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.resharding import delivery, reshard_checkpoint
from tiered_checkpoint_io.resharding.parts import plan_parts, shares_of
from tiered_checkpoint_io.stores.directory import DirectoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state():
    torch.manual_seed(0)
    return {
        "model": {
            "wide": torch.randn(41, 70),
            "transposed": torch.randn(7, 5).t(),
            "bf16": torch.randn(3, 4, 5).bfloat16(),
            "f8": torch.arange(6.0).to(torch.float8_e4m3fn),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 3),
            "nan": torch.tensor([float("nan"), -0.0]),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "m": torch.randn(9)}}, "groups": [{"lr": 0.1}]},
        "epoch": 3,
        "names": ["a", "b"],
    }


def bits(value):
    """Anything, with tensors as their type, shape and bytes."""
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list):
        return [bits(each) for each in value]
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0)
        return (value.dtype, tuple(value.shape), data.tolist())
    return value


def as_dcp_reads(where, tmp_path):
    """What stock DCP finds in a folder, whole."""
    target = tmp_path / f"{len(os.listdir(tmp_path))}.pt"
    dcp_to_torch_save(where, target)
    return torch.load(target, weights_only=False)


def reshard(*arguments, status=0):
    done = CliRunner().invoke(app, ["reshard", *map(str, arguments), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    return document_of("reshard", done)


def test_every_step_of_a_chain_is_what_was_saved_bit_for_bit(tmp_path, memory_dir):
    """One part, three, more than there are rows, one file, two parts."""
    run = tmp_path / "run"
    ours.save(state(), checkpoint_id="step_4", dirpath=str(run), memory_dir=memory_dir, wait=True)
    expected = bits(as_dcp_reads(run / "step_4", tmp_path))
    assert expected["model"] == bits(state()["model"])
    store = DirectoryStore(run)
    name = "step_4"
    for new, option in (("three", 3), ("many", 60), ("full.ckpt", None), ("two", 2), ("one", 1)):
        document = reshard(run, name, "--name", new, *(["--full"] if option is None else ["--ranks", option]))
        assert (document["source"], document["step"], document["resumable"]) == (name, 4, True)
        assert document["parts"] == (option or 1)
        content = read_manifest(store, new).content
        assert (content.parts, content.size) == (option or 1, document["size_bytes"])
        if option is None:
            assert bits(torch.load(run / new)) == expected
        else:
            assert bits(as_dcp_reads(run / new, tmp_path)) == expected
            loaded = state()
            for tensor in (*loaded["model"].values(), loaded["optimizer"]["state"][0]["m"]):
                tensor.zero_()
            loaded |= {"epoch": 0, "names": []}
            ours.load(loaded, checkpoint_id=new, dirpath=str(run), memory_dir=memory_dir)
            assert bits(loaded) == bits(state())
            # A rank has one file, and the first one the metadata.
            files = [len(files_of(store, content).of_rank(rank)) for rank in range(option)]
            assert files[0] == 2
            assert set(files[1:]) <= ({0, 1} if option > 41 else {1})
        name = new
    assert CliRunner().invoke(app, ["verify", str(run), "--tier", "durable"]).exit_code == 0
    listed = json.loads(CliRunner().invoke(app, ["ls", str(run), "--memory-dir", memory_dir, "--json"]).stdout)
    # Training resumes from the same checkpoint as before.
    assert [each["name"] for each in listed["checkpoints"] if each["is_latest"]] == ["step_4"]


def test_what_others_wrote_never_is_what_a_running_job_resumes_from(tmp_path, memory_dir):
    """Nothing tells whether training can: it is loaded by name."""
    run = tmp_path / "run"

    def save(step):
        config = {"dirpath": str(run), "memory_dir": memory_dir}
        ours.save(state(), checkpoint_id=f"step_{step}", wait=True, **config)

    save(4)
    torch.save({"w": torch.arange(9.0)}, run / "base.pt")
    dcp.save({"w": torch.arange(9.0)}, checkpoint_id=run / "plain", no_dist=True)
    for name, new, option in (("base.pt", "base", 2), ("plain", "parts", 2), ("plain", "plain.pt", None)):
        document = reshard(run, name, "--name", new, *(["--full"] if option is None else ["--ranks", option]))
        assert not document["resumable"]
        assert find_latest(run).name == "step_4"
        of_run, of_others = (read_manifest(DirectoryStore(run), each).content.save_id for each in ("step_4", new))
        assert of_others < of_run, "what goes by the order of saves keeps its own"
    # And once more.
    assert not reshard(run, "parts", "--name", "again", "--ranks", 3)["resumable"]
    save(5)
    assert find_latest(run).name == "step_5"
    for name in ("base", "again"):
        loaded = {"w": torch.zeros(9)}
        ours.load(loaded, checkpoint_id=name, dirpath=str(run), memory_dir=memory_dir)
        assert torch.equal(loaded["w"], torch.arange(9.0))


@pytest.mark.matrix
def test_another_number_of_ranks_loads_the_parts_of_dtensors(ranks, tmp_path, memory_dir):
    ranks(3, ["save", 5], save_to_s3=True)
    run = tmp_path / "durable"
    assert reshard(run, "tiered:latest", "--name", "two/step_5", "--ranks", 2)["parts"] == 2
    before, after = (as_dcp_reads(run / name, tmp_path) for name in ("step_5", "two/step_5"))
    assert bits(before) == bits(after)
    content = read_manifest(DirectoryStore(run), "two/step_5").content
    assert content.world_size == 2
    shutil.rmtree(run / "step_5")
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    for answer in ranks(2, ["load", 5, "two/step_5"]):
        assert answer[0].get("got", answer[0])["matches"]


@given(data=st.data())
def test_shares_cover_every_tensor_once(data):
    parts = data.draw(st.integers(1, 9))
    tensors = {}
    for index in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.lists(st.integers(0, 7), max_size=3))
        dim = data.draw(st.integers(0, max(0, len(size) - 1)))
        ranks = data.draw(st.integers(1, 4)) if size else 1
        pieces = torch.empty(size).chunk(ranks, dim) if size else [torch.empty(())]
        low, chunks = 0, []
        for piece in pieces:
            offsets = [low if each == dim else 0 for each in range(len(size))]
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.size()))
            low += piece.size(dim) if size else 0
        tensors[str(index)] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)
    shares = shares_of(tensors, parts)
    assert len(shares) == parts
    for name, entry in tensors.items():
        covered = torch.zeros(entry.size)
        boxes = [box for part in shares for other, box in part if other == name]
        assert boxes
        for box in boxes:
            covered[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))] += 1
        assert bool((covered == 1).all())


def test_files_are_read_once_and_a_small_scratch_folder_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_checkpoint_io.model.hashing.MIN_CHUNK_SIZE", 4096)
    source = {f"t{index}": torch.randn(64, 50) for index in range(8)}
    dcp.save(source, checkpoint_id=tmp_path / "run" / "step_1", no_dist=True)
    reshard_checkpoint(tmp_path / "run", "step_1", "four", parts=4)
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(folder, "fetch_chunk", lambda *asked: read.append(asked[1:3]) or fetch_chunk(*asked))
        reshard_checkpoint(tmp_path / "run", "four", "two", parts=2)
    assert len(read) == len(set(read)) > 4
    # Room for one part of four at a time.
    monkeypatch.setattr(delivery, "_room", lambda folder: 40_000)
    reshard_checkpoint(tmp_path / "run", "two", "again", parts=4)
    assert bits(as_dcp_reads(tmp_path / "run" / "again", tmp_path)) == bits(source)
    monkeypatch.setattr(delivery, "_room", lambda folder: 1000)
    with pytest.raises(ExportError, match="--scratch"):
        reshard_checkpoint(tmp_path / "run", "two", "never", parts=4)
    assert not (tmp_path / "run" / "never").exists()


@pytest.mark.parametrize(("name", "parts"), [("step_1", None), ("one.pt", 2)], ids=["as a file", "of a file"])
def test_a_scratch_folder_that_is_full_is_what_the_error_names(name, parts, tmp_path, monkeypatch):
    dcp.save({"t": torch.ones(50)}, checkpoint_id=tmp_path / "run" / "step_1", no_dist=True)
    reshard_checkpoint(tmp_path / "run", "step_1", "one.pt", parts=None)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: refuse("scratch"))
    with pytest.raises(ExportError, match="the scratch folder can't be written: No space left on device.*--scratch"):
        reshard_checkpoint(tmp_path / "run", name, "new", parts=parts)


def test_what_fails_leaves_nothing(tmp_path, memory_dir, s3_url):
    writer = TieredStorageWriter(dirpath=s3_url, memory_dir=memory_dir, wait=True)
    dcp.save(state(), checkpoint_id="step_4", storage_writer=writer)
    writer.close()
    reshard_checkpoint(s3_url, "step_4", "three", parts=3)
    with closing(ours_store(s3_url)) as store:
        before = sorted(entry.key for entry in store.list(""))
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        done = 0

        def stop(amount):
            nonlocal done
            done += amount
            if done > limit:
                raise StoreError("interrupted", operation="reshard")

        totals = []
        reshard_checkpoint(s3_url, "three", "two", parts=2, scratch=scratch, begin=totals.append)
        assert CliRunner().invoke(app, ["verify", s3_url, "two", "--tier", "durable"]).exit_code == 0
        for key in {entry.key for entry in store.list("")} - set(before):
            store.delete(key)
        for limit in range(0, totals[0], totals[0] // 6):
            done = 0
            with pytest.raises(StoreError, match="interrupted"):
                reshard_checkpoint(s3_url, "three", "two", parts=2, scratch=scratch, progress=stop)
            assert sorted(entry.key for entry in store.list("")) == before
            assert os.listdir(scratch) == []
        (key,) = [key for key in before if key.startswith("three/__1")]
        damaged = bytearray(store.get(key))
        damaged[len(damaged) // 2] ^= 1
        store.put(key, bytes(damaged))
        with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
            reshard_checkpoint(s3_url, "three", "two", parts=2, scratch=scratch)
        assert sorted(entry.key for entry in store.list("")) == before
    for taken in ("step_4", "three"):
        with pytest.raises(UsageError, match="the new name is taken"):
            reshard_checkpoint(s3_url, "step_4", taken, parts=2)
    for wrong in (["--ranks", 2, "--full"], [], ["--ranks", 0]):
        done = CliRunner().invoke(app, ["reshard", s3_url, "step_4", "--name", "x", *map(str, wrong)])
        assert done.exit_code == 2


@pytest.mark.parametrize("parts", [None, 1, 3])
def test_an_upload_that_fails_leaves_nothing_of_what_describes_it(parts, tmp_path, monkeypatch):
    """A checkpoint of many chunks has an index beside its manifest, which is written before the file."""
    run = tmp_path / "run"
    dcp.save({"t": torch.randn(64, 50)}, checkpoint_id=run / "step_1", no_dist=True)
    monkeypatch.setattr(commit, "_MAX_INLINE", 0)
    with closing(DirectoryStore(run)) as store:
        before = [entry.key for entry in store.list("")]

        def stop(_):
            if any(entry.key.startswith(".tiered/saves/") for entry in store.list("")):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reshard_checkpoint(run, "step_1", "new", parts=parts, progress=stop)
        assert [entry.key for entry in store.list("")] == before
        reshard_checkpoint(run, "step_1", "new", parts=parts)
    assert CliRunner().invoke(app, ["verify", str(run), "new", "--tier", "durable"]).exit_code == 0


@pytest.mark.parametrize("parts", [None, 1, 3])
def test_where_the_manifest_cannot_be_written_its_files_go(parts, tmp_path, monkeypatch):
    run = tmp_path / "run"
    dcp.save({"t": torch.randn(64, 50)}, checkpoint_id=run / "step_1", no_dist=True)

    def refused(*_):
        raise StoreError("refused", operation="put")

    with closing(DirectoryStore(run)) as store:
        before = [entry.key for entry in store.list("")]
        with monkeypatch.context() as patch:
            patch.setattr(Manifests, "put", refused)
            with pytest.raises(StoreError, match="refused"):
                reshard_checkpoint(run, "step_1", "new", parts=parts)
        # What marks that the file under this name was about to go is in no one's way.
        assert [entry.key for entry in store.list("") if entry.key != manifest_key("new")] == before
        assert read_manifest(store, "new") is None
    reshard_checkpoint(run, "step_1", "new", parts=parts)


@pytest.mark.parametrize("parts", [2, pytest.param(1, marks=pytest.mark.matrix)])
def test_what_takes_the_new_name_meanwhile_is_not_replaced(parts, tmp_path, memory_dir, s3_url, monkeypatch):
    """A training's save, or another reshard: the name was free when this one began."""
    writer = build(TieredStorageWriter, dirpath=s3_url, memory_dir=memory_dir, wait=True, drain="thread")
    dcp.save(state(), checkpoint_id="step_4", storage_writer=writer)
    others = {
        "step_5": lambda: dcp.save(state(), checkpoint_id="step_5", storage_writer=writer),
        "resharded": lambda: reshard_checkpoint(s3_url, "step_4", "resharded", parts=3),
    }
    for name, take in others.items():
        kept = {}
        with closing(ours_store(s3_url)) as store, monkeypatch.context() as patch:

            def plan(*asked, take=take, kept=kept, store=store, **options):
                if not kept:
                    kept["key"] = "being written"
                    take()
                    kept.update((entry.key, entry.modified) for entry in store.list(""))
                    del kept["key"]
                return plan_parts(*asked, **options)

            patch.setattr("tiered_checkpoint_io.resharding.reshard.plan_parts", plan)
            with pytest.raises(UsageError, match="another save has taken the new name"):
                reshard_checkpoint(s3_url, "step_4", name, parts=parts)
            assert {entry.key: entry.modified for entry in store.list("")} == kept
        assert CliRunner().invoke(app, ["verify", s3_url, name, "--tier", "durable"]).exit_code == 0
    writer.close()


def ours_store(url):
    from tiered_checkpoint_io.model.config import TieredCheckpointConfig
    from tiered_checkpoint_io.stores import open_store

    return open_store(TieredCheckpointConfig.from_any(dirpath=url))


def test_a_full_checkpoint_of_lightnings_is_one_for_programs_alone(tmp_path, memory_dir):
    """Its optimizers are called otherwise in sharded ones: what can't be resumed from is not offered for it."""
    io = build(TieredCheckpointIO, tmp_path / "run", memory_dir=memory_dir, drain="thread")
    saved = {
        "pytorch-lightning_version": "2.5.0",
        "global_step": 3,
        "epoch": 0,
        "state_dict": {"w": torch.randn(9, 2)},
        "optimizer_states": [],
        "loops": {},
    }
    io.save_checkpoint(saved, "step=3.ckpt")
    io.teardown()
    document = reshard(tmp_path / "run", "step=3.ckpt", "--name", "parts", "--ranks", 2)
    assert (document["step"], document["resumable"], document["kind"]) == (3, False, "sharded")
    loaded = {"state_dict": {"w": torch.zeros(9, 2)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "run" / "parts")
    assert torch.equal(loaded["state_dict"]["w"], saved["state_dict"]["w"])
    with pytest.raises(UsageError, match="one file already"):
        reshard_checkpoint(tmp_path / "run", "step=3.ckpt", "again.ckpt", parts=None)
    flip(tmp_path / "run" / "step=3.ckpt", at=1000)
    with pytest.raises(CorruptCheckpointError):
        reshard_checkpoint(tmp_path / "run", "step=3.ckpt", "never", parts=2)
