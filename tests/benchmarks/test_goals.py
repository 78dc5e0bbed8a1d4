"""Reports of the benchmarks on their goals: met or missed, and the parts of a miss, from figures of the same run."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("goals", "measure", "parts", "page", "s3_process"):
        sys.modules.pop(name, None)


def of(found, measure):
    from goals import judged

    (goal,) = (each for each in judged(found) if each["measure"].startswith(measure))
    return goal


def row(stall):
    parts = {"planning": 0.2, "copying and hashing": stall - 0.2, "hashing": 0.0}
    found = {"parts": parts, "hashing_s": 0.3}
    return found | {"contender": "ours, memory step", "state": "64 tensors", "stall": [stall], "memcpy": [1.0]}


def test_a_miss_says_of_which_parts_it_consists():
    missed, met = (of({"rows": [row(stall)]}, "eager stall / memcpy, 64") for stall in (1.7, 1.0))
    assert (missed["met"], missed["value"]) == (False, 1.7)
    parts = "planning 0.20, copying and hashing 1.50 (in copies)"
    assert missed["why"] == f"{parts}; hashing makes the copy longer by 0.30"
    assert met["met"] and met["why"] == ""


def test_the_greater_inflation_counts():
    inflation = {"overlapped": 0.01, "eager": 0.02, "drained": 0.05, "copied": 0.0, "uploaded": 0.06}
    overlap = {"inflation": inflation, "inflation_error": dict.fromkeys(inflation, 0.01), "cores": 2}
    missed = of({"rows": [], "overlap": overlap}, "step inflation")
    assert missed["value"] == 0.05 and "beside its drain +5.0% ± 1.0%" in missed["why"]


def test_the_parts_of_a_save_are_found():
    from parts import OF_DCP_LOAD, OF_LOAD, OF_SAVE, OF_SHARDED, Parts

    for functions in (OF_SAVE, OF_LOAD, OF_DCP_LOAD, OF_SHARDED):
        for part, paths in functions.items():
            for path in paths:
                with Parts({part: [path]}) as found:
                    assert found.seconds == {part: 0.0}, f"{path} is gone"


def test_the_page_says_of_each_benchmark_what_it_found_or_why_it_did_not(tmp_path):
    from goals import judged
    from page import SECTIONS, write

    machine = {"date": "today", "cores": 2, "memory_GiB": 8, "system": "Linux", "python": "3", "versions": {}}
    machine |= {"commit": "abc", "load_before": 0.0, "load_after": 0.0}
    found = {"options": "", "machine": machine, "mebibytes": 1, "rounds": 1, "rows": []}
    found |= {"overlap": {"error": "nothing"}, "restart": {"error": "nothing after 9 s"}}
    found["planning"] = {"plan_us": 8.5, "first_us": 16.0, "torch_save_us": 33.0}
    found["goals"] = judged(found)
    write(found, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert all(f"## {section.title}\n" in text for section in SECTIONS)
    assert "| a state | 8.50 |" in text
    assert "It could not be measured: nothing after 9 s." in text and "Not measured in this run." in text
    assert f"`goals_met=1 of {len(found['goals'])}`" in text
