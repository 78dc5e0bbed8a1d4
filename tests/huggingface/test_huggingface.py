"""Trainings with Hugging Face's Trainer and Accelerate, killed without notice and resumed from node memory."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.launch import free_port, launch, said

from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.model.events import totals_of

pytest.importorskip("transformers", reason="pip install -c constraints.txt '.[huggingface]'")

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def train(tmp_path, memory_dir, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(folder, ranks=1, more=(), **job):
        options = {
            "dirpath": str(tmp_path / folder / "durable"),
            "namespace": folder,
            "memory_dir": memory_dir,
            "memory_every_n_train_steps": 1,
            "s3_every_n_train_steps": 5,
            "wait_timeout_s": 60,
            "on_save_error": "raise",
            **dict(more),
        }
        job = {"output_dir": str(tmp_path / folder / "out"), "loop": "trainer", **job}
        jobs = [{"options": {**options, **own}, **job} for own in job.pop("of_each", [{}] * ranks)]
        answers = launch(tmp_path, jobs, worker=WORKER)
        if not {"die_after", "die_evaluating"} & set(job):
            assert None not in answers, said(tmp_path, answers.index(None))
        return answers

    return run


#: With dropout, shuffled data, a schedule, clipped and accumulated gradients; an evaluation draws random numbers, too.
EVALUATED = {"eval_strategy": "steps", "eval_steps": 7, "gradient_accumulation_steps": 1}
BY_EPOCH = {"eval_strategy": "epoch", "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("args", "die_after", "ranks"),
    [
        (EVALUATED, 7, 1),
        pytest.param(EVALUATED, 12, 1, marks=pytest.mark.matrix),
        pytest.param(BY_EPOCH, 6, 1, marks=pytest.mark.matrix),
        pytest.param(BY_EPOCH, 9, 1, marks=pytest.mark.matrix),
        pytest.param(EVALUATED, 5, 2, marks=pytest.mark.matrix),
    ],
)
def test_a_killed_trainer_resumes_bit_identically(train, tmp_path, args, die_after, ranks):
    whole = train("whole", ranks, args=args)
    assert train("killed", ranks, args=args, die_after=die_after) == [None] * ranks
    resumed = train("killed", ranks, args=args)
    assert {tuple(answer["from"]) for answer in resumed} == {(die_after, "memory")}
    for before, after in zip(whole, resumed, strict=True):
        assert before["from"] is None
        for what in ("weights", "losses", "evaluated"):
            assert after[what] == before[what], what
        assert after["left"] == [], "the folder that the Trainer resumed from is gone"
    last = len(whole[0]["losses"])
    durable = tmp_path / "killed" / "durable"
    assert sorted(path.name for path in durable.glob("*.ckpt")) == sorted(
        {f"step={step}.ckpt" for step in (*range(5, last, 5), last)}
    )
    # Readable without this package.
    state = torch.load(durable / f"step={last}.ckpt")
    assert (state["global_step"], len(state["rng"])) == (last, ranks)


def test_jobs_with_one_output_dir_resume_each_from_its_own_checkpoint(train, tmp_path):
    job = {"args": {"max_steps": 8}, "output_dir": str(tmp_path / "out")}
    other = {"dirpath": str(tmp_path / "other" / "durable"), "namespace": "other"}
    train("other", die_after=3, **job)
    train("mine", die_after=6, **job)
    (resumed,) = train("mine", beside=other, **job)
    assert resumed["from"] == [6, "memory"]
    assert resumed["began"] == [6]
    (left,) = resumed["left"]
    assert "-other-" in left, "the other job has not begun yet, and finds its own"


def test_a_restored_folder_that_can_not_be_removed_does_not_end_the_training(train, tmp_path):
    train("removed", die_after=6, args={"max_steps": 8})
    (resumed,) = train("removed", args={"max_steps": 8}, cleans=True)
    assert resumed["began"] == [6]
    assert "could not be removed" in said(tmp_path, 0)


def test_what_json_does_not_know_is_logged_and_the_training_goes_on_and_resumes(train, tmp_path):
    assert train("logged", logs_tensors=True, args={"max_steps": 8}, die_after=6) == [None]
    (resumed,) = train("logged", logs_tensors=True, args={"max_steps": 8})
    assert resumed["from"] == [6, "memory"]
    state = json.loads(torch.load(tmp_path / "logged" / "durable" / "step=8.ckpt")["trainer_state"])
    terms = [entry for entry in state["log_history"] if "term" in entry]
    assert len(terms) == 8, "those from before the kill, too"
    for entry in terms:
        assert entry["terms"] == [entry["term"] / 2] * 2
        assert (entry["value"], entry["of"]) == (1.5, "<class 'object'>")


def test_a_trainer_records_that_it_has_ended(train, memory_dir):
    train("measured", ranks=2, args={"max_steps": 3})
    (root,) = Path(memory_dir).glob("tiered-*/measured")
    events = read_events(root)
    assert [each["step"] for each in events if each["event"] == "start"] == [0], "one rank of the node speaks"
    assert [(each["step"], each["error"]) for each in events if each["event"] == "end"] == [(3, "")]
    assert not totals_of(events).running


def test_a_node_whose_memory_can_not_be_used_ends_the_training_of_all_ranks(train, tmp_path):
    answers = train("lost", ranks=2, of_each=[{}, {"memory_dir": str(tmp_path / "missing")}], starts_anew=True)
    assert [answer["failed"] for answer in answers] == ["MemoryTierError"] * 2
    for answer in answers:
        assert "missing" in answer["said"]
        assert answer["took_s"] < 60


def test_a_resumed_trainer_goes_on_with_its_own_saves(train):
    args = {**EVALUATED, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    assert train("both", args=args, die_after=6) == [None]
    (resumed,) = train("both", args=args)
    assert resumed["from"] == [6, "memory"]
    assert resumed["left"] == ["checkpoint-24"]


def test_a_resumed_trainer_that_looks_for_its_batch_size_begins_again_where_it_resumed(train, tmp_path):
    args = {"auto_find_batch_size": True, "max_steps": 12}
    assert train("short", args=args, die_after=6) == [None]
    (answer,) = train("short", args=args, short_after=8, more={"metrics_export": f"prometheus={free_port()}"})
    assert answer["began"] == [6, 6]
    assert answer["left"] == []
    assert said(tmp_path, 0).count("metrics: http://") == 2, "the server of the first attempt gave its port back"


@pytest.mark.parametrize(
    "saves",
    [
        {"save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 2},
        pytest.param({}, marks=pytest.mark.matrix),
    ],
    ids=["best", "last"],
)
def test_the_last_evaluation_is_made_again_where_it_was_killed(train, saves):
    args = {**BY_EPOCH, **saves}
    (whole,) = train("whole", args=args)
    assert train("killed", args=args, die_evaluating=12) == [None]
    (resumed,) = train("killed", args=args)
    assert resumed["from"] == [11, "memory"]
    for what in ("weights", "losses", "evaluated", "left"):
        assert resumed[what] == whole[what], what


@pytest.mark.parametrize(
    "saves",
    [
        {"save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1},
        pytest.param({}, marks=pytest.mark.matrix),
    ],
    ids=["best", "last"],
)
def test_an_evaluation_that_ends_the_training_leaves_the_last_step_durable(train, tmp_path, saves):
    train("stopped", args={**BY_EPOCH, **saves}, stops=1)
    durable = tmp_path / "stopped" / "durable"
    assert sorted(path.name for path in durable.glob("*.ckpt")) == ["step=5.ckpt", "step=6.ckpt"]
    state = torch.load(durable / "step=6.ckpt")
    assert state["global_step"] == 6
    # What was evaluated is known.
    assert '"eval_loss"' in state["trainer_state"]


def test_a_killed_loop_with_accelerate_resumes_bit_identically(train):
    (whole,) = train("whole", loop="accelerate", steps=8)
    assert train("killed", loop="accelerate", steps=8, die_after=4) == [None]
    (resumed,) = train("killed", loop="accelerate", steps=8)
    assert resumed["from"] == [4, "memory"]
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["weights"] == whole["weights"]
    assert resumed["seen"] == 8


def test_wrong_use_is_one_clear_message(tmp_path, memory_dir):
    job = {"folder": str(tmp_path), "memory_dir": memory_dir}
    answers, output = launch(tmp_path, [job], worker=WORKER.with_name("wrong_use.py")), said(tmp_path, 0)
    assert answers == ["done"], output
    told = [line for line in output.splitlines() if line.split(" ")[0].endswith("Error")]
    for line, words in zip(
        told,
        [
            "restore() before there is a Trainer",
            "step=1.ckpt is not a checkpoint of a transformers.Trainer",
            "restore_callback_states_from_checkpoint",
            "TieredCheckpointCallback with FSDP",
            "unknown key 'save_steps'",
            "the accelerator has 0 models, the checkpoint none",
            "AcceleratorCheckpoints with hooks of register_save_state_pre_hook",
            "AcceleratorCheckpoints with hooks of register_save_state_pre_hook",
            "TieredCheckpointCallback with a model whose parameters are sharded",
            "AcceleratorCheckpoints with a model whose parameters are sharded",
            "AcceleratorCheckpoints with a model whose parameters are sharded",
        ],
        strict=True,
    ):
        assert words in line
        assert " — " in line, "says what to do"
    assert "the Trainer also saves by itself, to" in output
    assert "training does not resume" in output
    assert output.count("AcceleratorCheckpoints exports no metrics") == 1


def test_a_library_that_is_missing_is_named(monkeypatch):
    ours = "tiered_checkpoint_io.huggingface"
    for name in [name for name in sys.modules if name == ours or name.startswith(ours + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tiered-checkpoint-io\[huggingface\]'"):
        import_module(ours)
