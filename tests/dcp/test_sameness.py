"""What no step changes any more is said once for the job, of checkpoints that several ranks save."""

from pathlib import Path

import pytest
from support.launch import launch, said

from .conftest import DEADLINE_S

WORKER = Path(__file__).with_name("sameness_worker.py")
MODEL, OPTIMIZER = "the model's state has not changed by a bit since step", "the optimizer's state has not changed by a"


@pytest.fixture
def lines(tmp_path, memory_dir):
    """Two ranks save as told; of each save, what was said, by all ranks together."""

    def run(kind, *saves, size=1000):
        options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread"}
        options["save_to_s3"] = False
        told = {"kind": kind, "saves": saves, "size": size, "options": options}
        answers = launch(tmp_path, [told] * 2, deadline_s=DEADLINE_S, worker=WORKER)
        assert None not in answers, [said(tmp_path, rank) for rank in range(2)]
        return [[*mine, *other] for mine, other in zip(*answers, strict=True)]

    return run


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("sharded", 1000),
        pytest.param("asynchronous", 1000, marks=pytest.mark.matrix),
        ("local", 1000),
        pytest.param("sharded", 9 << 20, marks=pytest.mark.matrix, id="several chunks"),
    ],
)
def test_what_all_ranks_find_unchanged_is_said_once(lines, kind, size):
    first, one_trains, again, no_optimizer, no_model, nothing, still_nothing = lines(
        kind,
        [10, {}],
        # Rank 0 has nothing but what is frozen.
        [20, {"1": ["model", "optim"]}],
        [20, {}],
        [30, {"1": ["model"], "0": ["model"]}],
        [40, {"0": ["optim"]}],
        [50, {}],
        [60, {}],
        size=size,
    )
    assert [first, one_trains, again] == [[], [], []]
    (line,) = no_optimizer
    assert OPTIMIZER in line
    assert "step 20: is its step() called" in line
    (line,) = no_model
    assert f"{MODEL} 30" in line
    assert [nothing, still_nothing] == [[], []], "once"


@pytest.mark.matrix
def test_what_trains_beside_a_frozen_model_is_a_change_of_it(lines):
    trains = {"1": ["lora", "optim"]}
    assert lines("sharded", [10, {}], [20, trains], [30, trains]) == [[], [], []]
