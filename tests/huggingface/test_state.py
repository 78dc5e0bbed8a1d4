"""What a restart finds other than it was: fewer GPUs, another host name, other data loaders."""

import logging
import random
import socket
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -c constraints.txt '.[huggingface]'")

from accelerate import Accelerator
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from tiered_checkpoint_io.huggingface import AcceleratorCheckpoints, TieredCheckpointCallback
from tiered_checkpoint_io.huggingface.state import random_states, set_random_state
from tiered_checkpoint_io.huggingface.trainer import Rank, writer_for


def test_a_restart_with_fewer_gpus_sets_the_random_states_of_those_it_has(monkeypatch):
    (state,) = random_states()
    expected = random.random()
    state["cuda"] = [torch.tensor([device], dtype=torch.uint8) for device in range(4)]
    were_set = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def set_rng_state(state, device="cuda"):
        if device != "cuda" and device >= 2:
            raise IndexError("tuple index out of range")
        were_set[device] = state.item()

    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    monkeypatch.setattr("torch.cuda.random.set_rng_state", set_rng_state)
    set_random_state(state)
    assert were_set == {0: 0, 1: 1}
    assert random.random() == expected


def test_each_start_that_fails_early_on_another_host_takes_the_place_of_the_one_before(
    tmp_path, memory_dir, monkeypatch
):
    def callback():
        made = TieredCheckpointCallback(str(tmp_path / "durable"), namespace="moved", memory_dir=memory_dir)
        args = SimpleNamespace(output_dir=str(tmp_path / "out"), process_index=0, local_process_index=0)
        made.on_init_end(args, TrainerState(stateful_callbacks={}), TrainerControl())
        return made

    first = callback()
    rng = random_states()
    state = {"model": {}, "optimizer": {}, "scheduler": {}, "rng": rng, "trainer_state": '{"stateful_callbacks": {}}'}
    first.checkpointer.save(state, "step=1.ckpt", tiers=["memory"])
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    found = [first.restore()]
    first.checkpointer.close()
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    second = callback()
    found.append(second.restore())
    second.checkpointer.close()
    assert [str(path) for path in (tmp_path / "out").glob(".tiered-restored-*")] == [found[1]]
    assert found[0] == found[1]


class Loader:
    """In place of a StatefulDataLoader that ``prepare`` has wrapped: torchdata need not be installed."""

    use_stateful_dataloader = True

    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.fixture
def loop(tmp_path, memory_dir):
    """Begins a loop with Accelerate anew, with these loaders; gives its checkpoints and its accelerator."""
    made = []

    def begin(*loaders, **options):
        accelerator = Accelerator(cpu=True)
        accelerator._dataloaders += loaders
        options = {"namespace": "loop", "memory_dir": memory_dir, "preflight": "off", **options}
        made.append(AcceleratorCheckpoints(str(tmp_path / "durable"), logger=logging.getLogger("loop"), **options))
        return made[-1], accelerator

    yield begin
    for each in made:
        each.close()


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "loop" and each.levelname == "WARNING"]


def test_stateful_data_loaders_go_on_where_they_were(loop, caplog):
    checkpoints, accelerator = loop(Loader(3), torch.utils.data.DataLoader([1]), Loader(5))
    checkpoints.save(accelerator, 10)
    checkpoints.close()
    first, second = Loader(), Loader()
    checkpoints, accelerator = loop(first, torch.utils.data.DataLoader([1]), second)
    assert checkpoints.load(accelerator) == 10
    assert (first.seen, second.seen) == (3, 5)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        ([], [Loader()], "the checkpoint has no states of data loaders, so the data starts anew"),
        ([Loader(3)], [Loader(), Loader()], "it is of 1 ranks with 1 each, here are 1 with 2"),
        ([Loader(3)], [], "does not restore the state of 1 data loader that the checkpoint holds"),
    ],
)
def test_data_loaders_that_can_not_be_restored_start_anew_with_one_warning(loop, caplog, saved, loaded, words):
    checkpoints, accelerator = loop(*saved)
    checkpoints.save(accelerator, 10)
    checkpoints.close()
    checkpoints, accelerator = loop(*loaded)
    assert checkpoints.load(accelerator) == 10
    assert [each.seen for each in loaded] == [0] * len(loaded)
    (warning,) = warnings(caplog)
    assert words in warning


def test_data_loaders_of_another_number_of_ranks_start_anew(loop, caplog):
    checkpoints, accelerator = loop()
    loader = Loader()
    state = {"global_step": 10, "accelerator_step": 0, "rng": random_states() * 2, "loaders": [[{"seen": 3}]] * 2}
    state |= {entry: [] for entry in ("models", "optimizers", "schedulers", "custom_objects", "scalers")}
    checkpoints.checkpointer.save(state, "step=10.ckpt", tiers=["memory"])
    checkpoints.close()
    checkpoints, accelerator = loop(loader)
    assert checkpoints.load(accelerator) == 10
    assert loader.seen == 0
    (warning,) = warnings(caplog)
    assert "it is of 2 ranks with 1 each, here are 1 with 1" in warning


@pytest.mark.parametrize(
    ("ranks", "writers"),
    [
        # Numbered node by node; one to each node in turn; all hosts of one name.
        ([("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 3, 1)], [0, 0, 2, 2]),
        ([("a", 0, 0), ("b", 1, 0), ("a", 2, 1), ("b", 3, 1)], [0, 1, 0, 1]),
        ([("localhost", 0, 0), ("localhost", 1, 1), ("localhost", 2, 0), ("localhost", 3, 1)], [0, 0, 2, 2]),
    ],
)
def test_each_rank_reads_what_was_written_on_its_node(ranks, writers):
    job = [Rank(*each) for each in ranks]
    assert [writer_for(each, job) for each in job] == writers


class Counting(torch.nn.Module):
    """A model with a state beside its tensors."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 1), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x, labels):
        self.seen += 1
        return {"loss": (self.linear(x) - labels).pow(2).mean()}


def test_a_model_with_a_state_beside_its_tensors_is_trained_and_saved(tmp_path, memory_dir):
    tiered = TieredCheckpointCallback(str(tmp_path / "durable"), namespace="extra", memory_dir=memory_dir)
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 32
    Trainer(Counting(), args, train_dataset=data, callbacks=[tiered]).train()
    assert torch.load(tmp_path / "durable" / "step=2.ckpt")["model"]["_extra_state"] == {"seen": 2}


def test_a_compiled_model_is_saved_as_itself_stays_as_it_was_and_takes_older_files(loop, tmp_path):
    compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    around = torch.compile(torch.nn.DataParallel(torch.nn.Linear(2, 1)), backend="eager")
    checkpoints, accelerator = loop()
    accelerator._models += [compiled, torch.nn.DataParallel(compiled), around]
    weights = [torch.clone(each.weight) for each in (compiled._orig_mod, around._orig_mod.module)]
    checkpoints.save(accelerator, 10, tiers=["durable"])
    assert type(around._orig_mod) is torch.nn.DataParallel, "ranks that lost DDP would train apart"
    checkpoints.close()
    saved = torch.load(tmp_path / "durable" / "step=10.ckpt")
    assert [list(state) for state in saved["models"]] == [["weight", "bias"]] * 3
    saved["models"] = [{f"_orig_mod.{name}": value + 1 for name, value in state.items()} for state in saved["models"]]
    checkpoints.checkpointer.save({**saved, "global_step": 20}, "step=20.ckpt", tiers=["memory"])
    assert checkpoints.load(accelerator) == 20
    assert torch.equal(compiled._orig_mod.weight, weights[0] + 1)
    assert torch.equal(around._orig_mod.module.weight, weights[1] + 1)


def test_a_long_evaluation_is_no_silence(tmp_path, memory_dir, monkeypatch):
    made = TieredCheckpointCallback(str(tmp_path / "durable"), memory_dir=memory_dir)
    reached = []
    monkeypatch.setattr(made._recording, "reach", lambda step, session: reached.append(step))
    made.on_prediction_step(SimpleNamespace(), TrainerState(global_step=7), TrainerControl())
    assert reached == [7]
