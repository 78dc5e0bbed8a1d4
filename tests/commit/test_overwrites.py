"""Amid an overwrite the objects are still those of the save before: all that asks the durable tier goes by that one."""

import json
from pathlib import Path

import pytest
from support import committing
from typer.testing import CliRunner

from tiered_checkpoint_io import find_latest
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.model.retention import Checkpoint, Latest, kept
from tiered_checkpoint_io.stores.directory import DirectoryStore


def command(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture(params=["full", "sharded"])
def store(tmp_path, request):
    """Saves steps 1 and 2; the node of a save of step 3 has died during its overwrite of step 1."""
    store = DirectoryStore(str(tmp_path / "run"))
    committing.save(store, "last", 1, kind=request.param)
    committing.save(store, "two", 2, kind=request.param)
    committing.begin_overwrite(store, "last", 3, kind=request.param)
    return store


def test_retention_keeps_what_is_the_latest(store):
    found = [Checkpoint.of(read_manifest(store, name)) for name in ("last", "two")]
    reasons = kept(found, [Latest(1)])
    assert find_latest(store.url).name == "two"
    assert "newest" in reasons["two"] and "newest" not in reasons["last"]
    assert command("prune", store.url, "--keep-latest", "1", "--yes").exit_code == 0
    assert find_latest(store.url).name == "two"


def test_verify_tells_the_save_that_is_there_and_what_is_wrong_with_it(store):
    def verified():
        (row,) = json.loads(command("verify", store.url, "last", "--json").stdout)["checkpoints"]
        assert row["step"] == 1
        return row

    assert verified()["state"] == "intact"
    path = Path(store.url, files_of(store, read_manifest(store, "last").settled).all()[0].path)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert verified()["state"] == "damaged"
    assert "in place of" not in verified()["error"]


def test_a_command_runs_for_what_is_there(store, memory_dir, capfd):
    line = ["watch", store.url, "--memory-dir", memory_dir, "--exec", "echo $TIERED_CKPT_NAME $TIERED_CKPT_STEP"]
    done = command(*line, "--after", "", "--idle-timeout", "0")
    assert (done.exit_code, capfd.readouterr().out.splitlines()) == (0, ["last 1", "two 2"]), done.stderr
