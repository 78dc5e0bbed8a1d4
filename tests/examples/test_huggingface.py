"""The example for Hugging Face's Trainer: killed without notice, it resumes from node memory, bit for bit."""

from pathlib import Path

import pytest
import torch
from support.launch import launch, said

pytest.importorskip("transformers", reason="pip install -c constraints.txt '.[examples]'")

WORKER = Path(__file__).with_name("huggingface_worker.py")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_killed_trainer_resumes_bit_identically(ranks, tmp_path, memory_dir, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def train(folder, **job):
        job |= {"dirpath": str(tmp_path / folder / "durable"), "output_dir": str(tmp_path / folder / "out")}
        job["options"] = {"memory_dir": f"{memory_dir}/{folder}", "on_save_error": "raise"}
        Path(memory_dir, folder).mkdir(exist_ok=True)
        answers = launch(tmp_path, [job] * ranks, worker=WORKER, deadline_s=150)
        if "die_after" not in job:
            assert None not in answers, said(tmp_path, answers.index(None))
        return answers

    whole = train("whole")
    # With dropout and shuffled data. Step 30 is in memory only; with two ranks it is of the second epoch.
    assert train("killed", die_after=30) == [None] * ranks
    resumed = train("killed")
    assert [(answer["began"], answer["left"]) for answer in resumed] == [(30, [])] * ranks
    for before, after in zip(whole, resumed, strict=True):
        assert before["began"] == 0
        assert after["losses"] == before["losses"]
        assert ranks > 1 or after["weights"] == before["weights"]
    names = sorted(path.name for path in (tmp_path / "killed" / "durable").glob("*.ckpt"))
    last = 64 // ranks
    assert names == sorted({f"step={last}.ckpt"} | ({"step=50.ckpt"} if last > 50 else set()))
    # Readable without this package.
    state = torch.load(tmp_path / "killed" / "durable" / f"step={last}.ckpt")
    assert (state["global_step"], len(state["rng"])) == (last, ranks)
