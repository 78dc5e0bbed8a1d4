"""The example for Ray Train: a worker is killed, the workers start again, and resume from node memory.

Its training function runs with a mock of Ray's API, not with Ray.
"""

from pathlib import Path

import torch
from support.launch import launch, said

WORKER = Path(__file__).with_name("ray_worker.py")


def test_workers_that_start_again_resume_from_memory(tmp_path, memory_dir):
    def train(folder, die_at):
        Path(memory_dir, folder).mkdir(exist_ok=True)
        tiers = {"dirpath": str(tmp_path / folder), "namespace": "ray", "memory_dir": f"{memory_dir}/{folder}"}
        weights = str(tmp_path / f"{folder}.pt")
        config = {"tiers": tiers, "steps": 50, "die_at": die_at, "weights": weights}
        return launch(tmp_path, [{"config": config, "options": tiers}] * 2, worker=WORKER), weights

    (answers, whole) = train("whole", 0)
    assert None not in answers, said(tmp_path, answers.index(None))
    assert train("killed", 37)[0] == [None, None]
    (answers, resumed) = train("killed", 37)
    assert None not in answers, said(tmp_path, answers.index(None))
    for reports in answers:
        assert [(each["step"], each["resumed_from"]) for each in reports] == [(40, 35), (50, 35)]
    assert "loading step=35.ckpt (memory" in said(tmp_path, 0)
    expected, found = torch.load(whole), torch.load(resumed)
    assert all(bool((found[name] == value).all()) for name, value in expected.items())
    names = sorted(path.name for path in (tmp_path / "killed").glob("*.ckpt"))
    assert names == ["step=20.ckpt", "step=40.ckpt"]
