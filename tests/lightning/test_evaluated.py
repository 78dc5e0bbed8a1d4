"""Checkpoints that can't be resumed: weights of one step with optimizers of another, weights only."""

import pytest
from support.as_lightning import INSTALLED
from support.training import Model, Stop

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


def best(**more):
    # Of steps 10 and 20, whose scores are 3 and 3 less: the first.
    return TieredModelCheckpoint(**{"every_n_train_steps": 10, "monitor": "score", "mode": "max", **more})


def newest(runs):
    trainer, _ = runs.fit(best(), max_steps=20)
    return trainer.io.checkpointer.restored.name


def evaluate(trainer, model, path=None, **limits):
    trainer.limit_test_batches = limits.get("batches", 1.0)
    trainer.test(model, ckpt_path=path, verbose=False)


def failed(trainer, model, path):
    model.test_dataloader = lambda: (_ for _ in ()).throw(Stop())
    with pytest.raises(Stop):
        evaluate(trainer, model, path)


def trained_on(trainer, model, path, *, steps=22, last=None):
    evaluate(trainer, model, path)
    trainer.fit_loop.max_epochs = 9
    trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.fit(model, ckpt_path=last)


@pytest.mark.parametrize(
    ("evaluates", "resumable"),
    [
        # The trainer then holds weights of another step, or of another module.
        (evaluate, False),
        (failed, False),
        (lambda trainer, *_: evaluate(trainer, Model()), False),
        (lambda trainer, model, path: evaluate(trainer, model, path, batches=0), False),
        # No evaluation since the training.
        (lambda *_: None, True),
        (trained_on, True),
        (lambda trainer, model, path: trained_on(trainer, model, path, steps=20, last="last.ckpt"), True),
    ],
)
def test_a_save_after_an_evaluation_is_not_resumable(evaluates, resumable, runs, caplog):
    callback = best(save_last=True)
    trainer, model = runs.fit(callback, ckpt_path=None)
    evaluates(trainer, model, callback.best_model_path)
    trainer.save_checkpoint("final.ckpt")
    trainer.io.teardown()
    assert "final.ckpt" in runs.durable()
    assert caplog.text.count("evaluated weights, and can't be resumed") == (not resumable)
    assert (newest(runs) == "final.ckpt") == resumable
    assert resumable or runs.io().load_checkpoint("final.ckpt")["global_step"] == 20


@pytest.mark.skipif(INSTALLED < (2, 6), reason="WeightAveraging came with Lightning 2.6")
def test_averages_that_a_training_has_ended_with_are_nothing_to_resume_from(runs, caplog):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    trainer, _ = runs.fit(best(), EMAWeightAveraging(), ckpt_path=None)
    before = newest(runs)
    trainer.save_checkpoint("final.ckpt")
    trainer.io.teardown()
    assert newest(runs) == before
    assert "averaged or best weights, and can't be resumed" in caplog.text
