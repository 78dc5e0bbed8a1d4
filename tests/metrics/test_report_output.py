"""Where ``report -o`` writes: files, links, pipes and devices."""

import os
import stat
import subprocess
import sys
import threading

import pytest
from support.committing import save
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def report(tmp_path, memory_dir):
    """Writes the report of a run of one durable checkpoint to a path."""
    save(DirectoryStore(str(tmp_path / "run")), "a.ckpt", 1)
    line = ["report", str(tmp_path / "run"), "--memory-dir", memory_dir, "-o"]

    def write(path):
        done = CliRunner().invoke(app, [*line, str(path)])
        assert done.exit_code == 0, done.output
        return done

    write.line = line
    return write


def test_a_file_is_one_that_others_may_read_as_any_program_leaves_it(report, tmp_path):
    before = os.umask(0o027)
    try:
        assert report(tmp_path / "run.html").stdout.startswith("wrote ")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.html").stat().st_mode) == 0o640


def test_a_link_stays_one_and_what_it_leads_to_is_written(report, tmp_path):
    (tmp_path / "www").mkdir()
    for name, target in (("old.html", "www/old.html"), ("new.html", "www/new.html")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "www" / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        report(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert "a.ckpt" in (tmp_path / "www" / name).read_text()
    assert sorted(os.listdir(tmp_path / "www")) == ["new.html", "old.html"]


def test_a_pipe_gets_the_page_and_stays_one(report, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    thread = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()), daemon=True)
    thread.start()
    done = report(tmp_path / "pipe")
    thread.join(30)
    assert (done.stdout, "wrote " in done.stderr) == ("", True)
    assert got and "a.ckpt" in got[0]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("to_file", [True, False])
def test_stdout_gets_the_page_alone(report, tmp_path, to_file):
    """By a link as /dev/stdout is, which an earlier release replaced where it ran as root."""
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    line = [sys.executable, "-m", "tiered_checkpoint_io", *report.line, str(tmp_path / "stdout")]
    if to_file:
        # What a job has written there before and writes after stays.
        with open(tmp_path / "run.html", "wb", buffering=0) as file:
            file.write(b"before\n")
            subprocess.run(line, stdout=file, check=True, timeout=60)
            file.write(b"\nafter")
        before, _, page = (tmp_path / "run.html").read_text().partition("\n")
        page, _, after = page.rpartition("\n")
        assert (before, after) == ("before", "after")
    else:
        page = subprocess.run(line, stdout=subprocess.PIPE, check=True, timeout=60, text=True).stdout
    assert (page[:15].lower(), page.rstrip()[-7:], "a.ckpt" in page) == ("<!doctype html>", "</html>", True)
    assert (tmp_path / "stdout").is_symlink()
