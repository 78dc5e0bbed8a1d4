"""Log lines: who, where, which step, how long, how much; into a file, and to a user's own logger."""

import logging
import re

import pytest
import torch
from support.bad_input import state

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.logs import GIB, get_logger, rate

LINE = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\] \[(?P<namespace>[\w-]+)\] \[(?P<logger>[\w.]+)\]"
    r" \[(?P<level>[A-Z]+)\] \[(?P<file>\w+\.py):(?P<line>\d+)\] \[Rank (?P<rank>\d+)\]"
    r" (?:Step (?P<step>\d+): )?(?P<text>.+)"
)


@pytest.fixture
def job(tmp_path, memory_dir):
    made = []

    def job(**options):
        io = TieredCheckpointIO(
            **{
                "dirpath": tmp_path / "d",
                "memory_dir": memory_dir,
                "namespace": "gpt-1",
                "log_dir": tmp_path / "logs",
                "drain": "thread",
                **options,
            }
        )
        made.append(io)
        return io

    yield job
    for io in made:
        io.teardown()


def lines(path):
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found), path.read_text()
    return [match.groupdict() for match in found]


def test_a_life_in_lines(job, tmp_path):
    io = job()
    assert not io.load_checkpoint("tiered:latest")
    io.save_checkpoint({"w": torch.zeros(5 << 20), "global_step": 7}, "a.ckpt")
    io.teardown()
    job().load_checkpoint("tiered:latest")
    said = lines(tmp_path / "logs" / "gpt-1_checkpointing.log")
    assert {(each["namespace"], each["rank"], each["level"]) for each in said} == {("gpt-1", "0", "INFO")}
    assert {each["logger"] for each in said} == {"tiered_checkpoint_io"}
    texts = [(each["file"], each["step"], each["text"]) for each in said]
    amount = r"0\.02 GiB in \d+\.\d+ s \(\d+\.\d+ GiB/s\)"
    for file, step, text in (
        ("checkpointer.py", None, "no checkpoint at .*/d: starting from scratch"),
        ("execute.py", "7", f"a.ckpt is durable: {amount}"),
        ("part.py", "7", f"saved a.ckpt to memory and .*/d: {amount}"),
        ("restore.py", "7", r"resuming from a.ckpt \(memory, 0.02 GiB\) after \d+\.\d+ s"),
    ):
        assert [t for t in texts if t[:2] == (file, step) and re.fullmatch(text, t[2])], (file, step, text, texts)


def test_a_failure_is_a_line_with_its_step_or_none(job, tmp_path):
    io = job(dirpath="s3://bucket", profile="nobody", on_save_error="raise")
    with pytest.raises(SaveError):
        io.save_checkpoint(state(3), "a.ckpt")
    with pytest.raises(SaveError):
        io.teardown()
    bad = [each for each in lines(tmp_path / "logs" / "gpt-1_checkpointing.log") if each["level"] == "ERROR"]
    assert {"3", None} == {each["step"] for each in bad}
    assert not [each for each in bad if "Step -1" in each["text"]]


def test_each_job_has_one_file_and_one_line_for_each_event(job, tmp_path):
    for _ in range(2):
        io = job(dirpath=tmp_path / "e", namespace="other")
        io.save_checkpoint(state(1), "a.ckpt", storage_options={"tiers": ["memory"]})
        io.teardown()
    said = lines(tmp_path / "logs" / "other_checkpointing.log")
    assert len([each for each in said if each["text"].startswith("saved")]) == 2


def test_jobs_of_one_process_keep_out_of_each_others_files(job, tmp_path):
    for namespace in ("one", "two"):
        job(namespace=namespace).save_checkpoint(state(1), "a.ckpt")
    for namespace in ("one", "two"):
        assert {each["namespace"] for each in lines(tmp_path / "logs" / f"{namespace}_checkpointing.log")} == {
            namespace
        }


def test_a_users_own_logger_gets_it_all_with_their_own_format(job, tmp_path, capfd):
    said = []

    class Theirs(logging.Handler):
        def emit(self, record):
            said.append((record.name, record.namespace, record.rank, record.getMessage()))

    theirs = logging.getLogger("theirs")
    theirs.propagate = False
    theirs.setLevel(logging.INFO)
    theirs.addHandler(Theirs())
    adapter = logging.LoggerAdapter(theirs, {})
    for logger in (theirs, adapter):
        said.clear()
        io = job(logger=logger, log_dir=None)
        io.save_checkpoint(state(4), "a.ckpt")
        io.teardown()
        assert {each[:3] for each in said} == {("theirs", "gpt-1", 0)}
        assert [each for each in said if each[3].startswith("Step 4: saved a.ckpt")]
        assert [each for each in said if each[3].startswith("Step 4: a.ckpt is durable")]
    assert "saved a.ckpt" not in capfd.readouterr().err


def test_the_rank_and_the_step_are_those_given(tmp_path):
    log = get_logger("ns", rank=3, log_dir=str(tmp_path))
    log.at_step(12).warning("text %d", 5)
    log.at_step(-1).warning("text")
    first, second = lines(tmp_path / "ns_checkpointing.log")
    assert (first["rank"], first["step"], first["text"], first["file"]) == ("3", "12", "text 5", "test_logs.py")
    assert second["step"] is None


def test_amounts():
    assert rate(3 * GIB // 2, 0.75) == "1.50 GiB in 0.750 s (2.00 GiB/s)"
