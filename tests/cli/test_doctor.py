"""doctor tries what a training tries before its first batch, names what fails, and is content once that is mended."""

import json

import pytest
from support.clocks import hurried
from support.documented import command


@pytest.fixture(autouse=True)
def patient():
    """Makes preflight wait for a slow machine's server."""
    with hurried(preflight_s=60.0):
        yield


@pytest.fixture
def doctor(memory_dir):
    """Runs the command; returns its exit status, and the failed checks, by their names."""

    def run(*arguments, memory_dir=memory_dir):
        done = command("doctor", *arguments, "--memory-dir", memory_dir, "--json")
        assert isinstance(done.exception, SystemExit | None), done.exception
        found = json.loads(done.stdout)
        assert found["memory_dir"] == str(memory_dir)
        return done.exit_code, {each["what"]: each for each in found["checks"] if each["status"] != "ok"}

    return run


def test_a_directory_that_takes_no_files(doctor, memory_dir, tmp_path):
    assert doctor(tmp_path / "run") == (0, {})
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    (tmp_path / "file").touch()
    status, bad = doctor(tmp_path / "file")
    assert (status, bad["put"]["status"]) == (1, "fail")
    _, first, *_, last = command("doctor", tmp_path / "file", "--memory-dir", memory_dir).stdout.splitlines()
    assert first.startswith(f"ok\tmemory tier\t{memory_dir} can hold ")
    assert last.startswith(f"fail\tput\t{tmp_path / 'file'}: put failed")
    assert last.count("\t") == 3 and not last.endswith("\t"), "it says what to do"


def test_it_looks_by_the_options_of_the_last_run(kept, doctor, tmp_path):
    """A spill_dir that this user can't use is known from the run's own configuration."""
    assert doctor(kept.options["dirpath"], memory_dir=kept.options["memory_dir"]) == (0, {})
    (tmp_path / "file").touch()
    io = kept.io(spill_dir=str(tmp_path / "file"), preflight="off")
    io.save_checkpoint({"global_step": 1}, "x.ckpt")
    io.teardown()
    status, bad = doctor(kept.options["dirpath"], memory_dir=kept.options["memory_dir"])
    assert (status, bad["room"]["status"]) == (1, "fail")
    assert "where this user may not write" in bad["room"]["measured"]
