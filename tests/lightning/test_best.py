"""The best checkpoints on the durable tier, where one of them does not get there."""

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.client import DrainHandle


def test_the_best_stays_while_the_better_one_is_not_on_the_durable_tier(runs, monkeypatch):
    has_room, asked = DrainHandle.has_room, []

    def is_full_once(self, *arguments, **options):
        asked.append(self)
        return len(asked) != 2 and has_room(self, *arguments, **options)

    monkeypatch.setattr(DrainHandle, "has_room", is_full_once)

    def callback():
        return TieredModelCheckpoint(
            monitor="score", save_top_k=1, save_last=True, every_n_train_steps=5, memory_every_n_train_steps=None
        )

    # The scores of steps 5, 10, 15 and 20 are 8, 3, 8 and 3: step 10 takes the place of step 5, and is left out.
    first = callback()
    runs.fit(first, ckpt_path=None, max_steps=20)
    assert first.best_model_path.endswith("step=10.ckpt")
    assert runs.durable() == ["epoch=0-step=5.ckpt", "last.ckpt"]
    # Nor does the next run delete it.
    runs.wipe()
    trainer, _ = runs.fit(callback(), ckpt_path="last", max_steps=26)
    assert trainer.global_step == 26
    assert "epoch=0-step=5.ckpt" in runs.durable()
