"""Meta's torch_checkpointing over both tiers: a training that is killed without notice, and the storage's own rules."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch
from support.launch import free_port, launch, said
from support.losing import lose_memory
from support.restoring import flip, of_a_newer_release
from support.supporting import build
from support.tenants import mounted_tmpfs

pytest.importorskip("torch_checkpointing", reason="pip install -c constraints.txt '.[torch-checkpointing]'")

from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.torch_checkpointing import TieredStorageConfig

WORKER = Path(__file__).with_name("torch_checkpointing_worker.py")


def test_a_killed_training_resumes_bit_identically(tmp_path, memory_dir):
    def train(folder, **job):
        options = {"namespace": folder, "memory_dir": memory_dir, "wait_timeout_s": 60, "on_save_error": "raise"}
        job |= {"dirpath": str(tmp_path / folder), "steps": 22, "options": options}
        (answer,) = launch(tmp_path, [job], worker=WORKER)
        assert answer is not None or "die_after" in job, said(tmp_path, 0)
        return answer

    whole = train("whole")
    assert train("killed", die_after=13) is None
    resumed = train("killed")
    assert resumed == {"weights": whole["weights"], "first": 12}, "step 12 was in memory alone"
    durable = sorted(path.name for path in (tmp_path / "killed").glob("step_*"))
    assert durable == ["step_10", "step_20"]
    # Readable without either package.
    files = torch.load(tmp_path / "killed" / "step_20")["files"]
    model = torch.load(io.BytesIO(files["model_0.pt"].numpy().tobytes()))
    assert set(model) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.fixture
def config(tmp_path, memory_dir):
    config = build(TieredStorageConfig, str(tmp_path / "durable"), {"memory_dir": memory_dir, "wait_timeout_s": 60})
    yield config
    config.close()


def write(storage, name, **files):
    for file, content in files.items():
        with storage.stream_write(Path(f"tmp_{name}") / file) as stream:
            stream.write(content)
    storage.rename(Path(f"tmp_{name}"), Path(name), is_directory=True)


def test_metrics_are_not_exported_and_one_warning_says_what_is_run_beside_it(tmp_path, memory_dir, monkeypatch, caplog):
    monkeypatch.setenv("TIERED_CHECKPOINT_METRICS", "prometheus=9464")
    config = TieredStorageConfig(str(tmp_path / "durable"), {"namespace": "gpt-1", "memory_dir": memory_dir})
    for name in ("step_1", "step_2"):
        write(config.create_storage(), name, model=b"1")
    config.close()
    (said,) = (each.getMessage() for each in caplog.records if "exports no metrics" in each.getMessage())
    assert "tiered-ckpt metrics --namespace gpt-1 --export prometheus=9464" in said


def test_the_rules_of_a_storage(config):
    storage = config.create_storage()
    assert not storage.exists(Path("tiered:latest"))
    write(storage, "step_1", a=b"one", empty=b"")
    write(storage, "step_2", a=json.dumps([2]).encode())
    reader = config.create_storage()
    assert reader.ls(Path()) == ["step_1", "step_2"]
    assert reader.ls(Path("step_1")) == ["a", "empty"]
    assert reader.read(Path("step_1/a")) == b"one"
    assert reader.read(Path("step_1/empty")) == b""
    assert reader.read(Path("tiered:latest/a")) == b"[2]"
    stream = reader.stream_read(Path("step_1/a"))
    assert stream.seek(1) == 1
    assert stream.read() == b"ne"
    assert [reader.getsize(Path("step_1/a")), reader.isdir(Path("step_1"))] == [3, True]
    with pytest.raises(FileNotFoundError):
        reader.read(Path("step_1/b"))
    with pytest.raises(FileExistsError):
        write(storage, "step_1", a=b"other")
    assert reader.read(Path("step_1/a")) == b"one"
    storage.rmdir(Path("step_2"))
    assert reader.ls(Path()) == ["step_1"]


def test_what_was_loaded_takes_no_node_memory_once_it_is_removed(config, memory_dir):
    """A manager reads by one storage and writes by another, and keeps both."""
    reader, writer = config.create_storage(), config.create_storage()
    write(writer, "step_1", a=bytes(1 << 20))
    assert reader.read(Path("tiered:latest/a")) == bytes(1 << 20)
    for step in range(2, 6):
        write(writer, f"step_{step}", a=bytes(1 << 20))
    config.checkpointer.session.wait()
    write(writer, "step_6", a=bytes(1 << 20))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if memory_dir in line]
    assert not [line for line in mapped if line.endswith("step_1 (deleted)")]


def test_a_save_that_has_no_room_does_not_stop_training(tmp_path, warned):
    """Nothing is raised for it, and nothing of it is held."""
    with mounted_tmpfs(tmp_path / "shm", 8 << 20) as small:
        options = {"memory_dir": str(small), "spill_dir": None, "memory_allocation_percentage": 100}
        config = TieredStorageConfig(str(tmp_path / "durable"), options, s3_every_n_steps=10)
        storage = config.create_storage()
        with warned("steps of memory alone are skipped"):
            write(storage, "step_1", a=bytes(12 << 20))
        write(storage, "step_2", a=b"two")
        assert not storage.exists(Path("tmp_step_1"))
        assert config.create_storage().ls(Path()) == ["step_2"]
        config.close()


def test_a_server_that_does_not_answer_does_not_stop_training(memory_dir, monkeypatch):
    """As after a restart in an outage: which names are taken there, nothing tells."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    endpoint = f"http://127.0.0.1:{free_port()}"
    options = {"memory_dir": memory_dir, "endpoint_url": endpoint, "durable_timeout_s": 1, "pending_timeout_s": 1}
    config = build(TieredStorageConfig, "s3://bucket/run", {**options, "drain": "thread"}, s3_every_n_steps=10)
    storage = config.create_storage()
    write(storage, "step_1", a=b"one")
    write(storage, "step_2", a=b"two")
    with pytest.raises(FileExistsError):
        write(storage, "step_2", a=b"other")
    assert config.create_storage().read(Path("step_2/a")) == b"two"
    config.close()


def test_what_is_refused_is_not_held(config):
    storage = config.create_storage()
    write(storage, "step_1", a=b"one")
    with pytest.raises(FileExistsError):
        write(storage, "step_1", a=b"other")
    assert not storage.exists(Path("tmp_step_1"))
    assert storage.read(Path("step_1/a")) == b"one"


@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("cut", "missing"))]
)
def test_a_damaged_checkpoint_does_not_stop_the_training_that_comes_to_its_id_again(
    damage, config, tmp_path, memory_dir
):
    storage = config.create_storage()
    write(storage, "step_1", a=b"one")
    write(storage, "step_2", a=b"two" * 1000)
    config.close()
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    file = tmp_path / "durable" / "step_2"
    if damage == "flipped":
        flip(file, at=file.read_bytes().index(b"twotwo"))
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    reader, writer = config.create_storage(), config.create_storage()
    assert reader.read(Path("tiered:latest/a")) == b"one"
    write(writer, "step_2", a=b"again")
    config.close()
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    assert config.create_storage().read(Path("tiered:latest/a")) == b"again"
    # What is intact is refused, wherever it is.
    for name in ("step_1", "step_2"):
        with pytest.raises(FileExistsError):
            write(writer, name, a=b"other")


def test_what_a_newer_release_saved_is_not_replaced(config, tmp_path, memory_dir):
    storage = config.create_storage()
    write(storage, "step_1", a=b"one")
    config.close()
    lose_memory(memory_dir)
    os.mkdir(memory_dir)
    manifest = tmp_path / "durable" / ids.manifest_key("step_1")
    manifest.write_bytes(of_a_newer_release(manifest.read_bytes()))
    with pytest.raises(FileExistsError):
        write(config.create_storage(), "step_1", a=b"other")


def test_what_would_never_be_committed_is_refused(config, monkeypatch):
    storage = config.create_storage()
    for path in ("step_1/a", "/elsewhere/tmp_step_1/a"):
        with pytest.raises(UsageError, match="one name below dirpath"):
            storage.write(Path(path), b"")
    with pytest.raises(OSError) as refused:
        storage.rename(Path("tmp_step_1"), Path("step_1"), is_directory=True)
    assert refused.value.errno == errno.ENOTSUP
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"job of several processes.*tiered_checkpoint_io\.dcp"):
        config.create_storage()
