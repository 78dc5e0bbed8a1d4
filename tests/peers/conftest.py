"""Jobs on nodes that are simulated by memory folders of their own, whose parts have copies on peers."""

import os
from pathlib import Path

import pytest
from support.launch import launch, said
from support.losing import lose_memory
from support.supporting import supported

WORKER = Path(__file__).with_name("worker.py")
DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def drain_in_a_thread():
    """Runs drains in threads, which start faster; tests/drain and tests/crash have processes."""
    with supported(drain="thread"):
        yield


@pytest.fixture
def ranks(tmp_path, memory_dir):
    """Runs steps of ``worker.py`` on ranks placed on nodes (a letter a rank); returns answers, by step and rank.

    A node is a memory folder and a machine of its own, unless ``machines`` are given (a letter a rank, too).
    """

    def run(nodes, *steps, dead=(), places=None, machines=None, **options):
        options = {"dirpath": str(tmp_path / "durable"), "save_to_s3": False, "wait_timeout_s": 60, **options}
        jobs = []
        for rank, node in enumerate(nodes):
            os.makedirs(f"{memory_dir}/{node}", exist_ok=True)
            jobs.append({"options": {**options, "memory_dir": f"{memory_dir}/{node}"}, "steps": steps})
            if machines is not None:
                jobs[-1]["machine"] = machines[rank]
            if places is not None:
                jobs[-1]["netns"] = places[node]
        answers = launch(tmp_path, jobs, deadline_s=DEADLINE_S, worker=WORKER)
        assert [r for r, answer in enumerate(answers) if answer is None] == list(dead), said(
            tmp_path, next((r for r, a in enumerate(answers) if a is None and r not in dead), 0)
        )
        rows = [[answer[index] if answer else None for answer in answers] for index in range(len(steps))]
        return [[each.get("got", each) if each else None for each in by_rank] for by_rank in rows]

    return run


@pytest.fixture
def lose(memory_dir):
    """Takes all that some nodes have in memory."""

    def lose(*nodes):
        for node in nodes:
            lose_memory(f"{memory_dir}/{node}")

    return lose


def pytest_terminal_summary(terminalreporter):
    """Prints the number of recovered losses, and their requests to the durable tier."""
    rows = [dict(each.user_properties) for each in terminalreporter.getreports("passed") if each.when == "call"]
    losses = [each["durable_gets"] for each in rows if "durable_gets" in each]
    if losses:
        terminalreporter.write_line(f"losses_recovered={len(losses)} durable_gets={sum(losses)}")
