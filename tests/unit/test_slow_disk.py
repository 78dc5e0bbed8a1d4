"""A local disk that is slow to sync beside a durable tier that answers: no store is silent meanwhile."""

import errno
import os
import time
from pathlib import Path

import pytest
from support.clocks import quick
from support.draining import Node
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import ExportError, StoreUnavailableError
from tiered_checkpoint_io.export import new_files
from tiered_checkpoint_io.stores.silence import answer_within, local_work

#: Names that no file gets.
FAILING = set()


@pytest.fixture
def calls(monkeypatch):
    """What is done to files from now on: the paths that are synced, and links."""
    found, sync, link = [], os.fsync, os.link

    def slow(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.append(path)
        time.sleep(1.5 if "/here/" in path else 0)
        sync(descriptor)

    def noted(source, target, **options):
        found.append("link")
        if Path(target).name in FAILING:
            raise FileExistsError(errno.EEXIST, "it exists already")
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(os, "link", noted)
    return found


def test_a_pull_to_a_slow_disk_syncs_all_files_and_then_names_them(memory_dir, tmp_path, calls):
    node = Node(memory_dir, str(tmp_path / "run"))
    for rank in (0, 1):
        node.part("step_1", 1, rank)
    node.drain()
    calls.clear()
    line = ["get", node.dirpath, "step_1", str(tmp_path / "here"), "--timeout", "1"]
    done = CliRunner().invoke(app, line)
    assert (done.exit_code, "has not answered" in done.output) == (0, False), done.exception
    there = {path.name for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert len(there) == 5
    assert [each == "link" for each in calls] == [False] * 5 + [True] * 5


def test_where_one_file_gets_no_name_none_has(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(f"{__name__}.FAILING", {"c"})
    with pytest.raises(ExportError, match="c can't be written"), new_files([(tmp_path / each, 8) for each in "abc"]):
        pass
    assert calls.count("link") == 3
    assert not list(tmp_path.iterdir())


def test_local_work_is_no_silence():
    clock = quick(silence_line_s=0.1)

    def work():
        with local_work():
            time.sleep(1)
        return "done"

    said = []
    assert answer_within(0.3, work, clock=clock, count_down=lambda *figures: said.append(figures)) == "done"
    assert not said

    def then_silent():
        with local_work():
            pass
        time.sleep(1)

    with pytest.raises(StoreUnavailableError):
        answer_within(0.3, then_silent, clock=clock)
