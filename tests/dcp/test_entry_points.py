"""Torch's own entry points do by our writer and reader what they do by torch's FileSystemWriter and FileSystemReader."""

import sys
from pathlib import Path

import pytest
from support.launch import launch

sys.path.insert(0, str(Path(__file__).parent))

from entry_points_worker import GROUPS, entry_points, load_cases, save_cases

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = Path(__file__).with_name("entry_points_worker.py")
DEADLINE_S = 170.0


def check(answers, count):
    """Checks that both refuse, or load the same."""
    assert len(answers) == count
    differing = [answer for answer in answers if list(map(plain, answer[1])) != list(map(plain, answer[2]))]
    assert not differing, "\n".join(map(str, differing))
    assert any("refused" not in map(plain, ours) for _, ours, _ in answers)


def plain(outcome):
    return "refused" if isinstance(outcome, str) else outcome


def alone(kind, cases, memory_dir, tmp_path):
    job = {"options": {"memory_dir": memory_dir}, "folder": str(tmp_path / "stock")}
    check(entry_points(job, kind, cases), len(cases))


def by_ranks(count, kind, cases, memory_dir, tmp_path):
    job = {
        "options": {"memory_dir": memory_dir},
        "folder": str(tmp_path / "stock"),
        "steps": [["entry_points", {"kind": kind, "cases": cases}]],
    }
    for (answer,) in launch(tmp_path, [job] * count, deadline_s=DEADLINE_S, worker=WORKER):
        check(answer.get("got", answer), len(cases))


#: The SageMaker library's own call, and its kin: the step is in the writer, and no ``checkpoint_id`` is given.
OF_SAGEMAKER = [["default", entry, "step", False, "new"] for entry in ("save", "thread", "save_state_dict")]
LOADED = [["default", "load", "step", False, "new"], ["default", "load", "nothing", False, "again"]]


def test_a_step_in_the_writer_needs_no_checkpoint_id(memory_dir, tmp_path):
    by_ranks(2, "save", OF_SAGEMAKER, memory_dir, tmp_path)


@pytest.mark.parametrize(("kind", "cases"), [("save", OF_SAGEMAKER), ("load", LOADED)])
def test_a_step_in_the_writer_needs_no_checkpoint_id_without_a_process_group(kind, cases, memory_dir, tmp_path):
    alone(kind, cases, memory_dir, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "all_cases"), [("save", save_cases), ("load", load_cases)])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_entry_points_do_as_with_the_files_of_torch(count, kind, all_cases, memory_dir, tmp_path):
    cases = all_cases(GROUPS[: count + 1] if count else GROUPS[:1])
    if count:
        by_ranks(count, kind, cases, memory_dir, tmp_path)
    else:
        alone(kind, cases, memory_dir, tmp_path)
