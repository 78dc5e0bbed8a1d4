"""Policies of the durable tier, and TieredModelCheckpoint's own save_top_k."""

import pytest

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError

POLICIES = [{"latest": 2}, {"every_steps": 10}, {"best": 1, "metric": "score", "mode": "max"}]


def best(**more):
    return TieredModelCheckpoint(
        **{"monitor": "score", "mode": "max", "s3_every_n_train_steps": 2, "filename": "{step}", **more}
    )


@pytest.mark.parametrize("runs_on_each", ["s3"], indirect=True)
def test_policies_decide_in_place_of_save_top_k(runs_on_each):
    """What the callback saves is thinned by the policies alone; last.ckpt moves on, and the best stays where it says."""
    runs = runs_on_each
    io = runs.io(retention=POLICIES)
    callback = best(save_top_k=-1, save_last=True)
    trainer, _ = runs.fit(callback, io=io)
    # The score is 9 at steps 8 and 18, of which the earlier is the best.
    assert runs.durable() == ["last.ckpt", "step=10.ckpt", "step=18.ckpt", "step=20.ckpt", "step=8.ckpt"]
    assert callback.best_model_path.endswith("/step=8.ckpt")
    assert trainer.io.load_checkpoint(callback.best_model_path)["global_step"] == 8
    trainer.io.teardown()


@pytest.mark.parametrize(
    ("callback", "policies", "said"),
    [
        ({"save_top_k": 3}, POLICIES, "add {best: 3, metric: score, mode: max} to retention"),
        ({"mode": "min"}, POLICIES, "add {best: 1, metric: score, mode: min} to retention"),
        ({"save_top_k": -1}, [{"latest": 2}], "add {best: 1, metric: score, mode: max} to retention"),
    ],
)
def test_a_callback_whose_best_would_be_removed_is_refused(runs, callback, policies, said):
    with pytest.raises(ConfigError, match="which no policy of retention keeps") as refused:
        runs.fit(best(**callback), io=runs.io(retention=policies))
    assert said in str(refused.value)
    assert runs.durable() == []
