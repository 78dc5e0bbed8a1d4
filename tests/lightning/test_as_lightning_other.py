"""State, loggers, and what else a ModelCheckpoint is: Lightning's, and TieredModelCheckpoint."""

import copy
import pickle

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from support.as_lightning import Tiny, Topic

OTHER = Topic("State, loggers, and the rest")


@pytest.mark.parametrize("case", OTHER.cases, ids=str)
def test_other(case, tmp_path, memory_dir):
    seen, expected = case.run(tmp_path, memory_dir)
    assert seen == expected


def test_the_document_has_each_case_and_the_reverse():
    assert OTHER.tested() == OTHER.documented()


def values(callback):
    return {key: str(value) for key, value in vars(callback).items() if key.lstrip("_") in PUBLIC}


PUBLIC = [
    "monitor",
    "verbose",
    "save_last",
    "save_top_k",
    "save_weights_only",
    "auto_insert_metric_name",
    "save_on_train_epoch_end",
    "enable_version_counter",
    "last_global_step_saved",
    "current_score",
    "best_k_models",
    "kth_best_model_path",
    "best_model_score",
    "last_model_path",
    "last_checkpoint_saved",
    "kth_value",
    "mode",
    "filename",
    "train_time_interval",
    "every_n_epochs",
    "every_n_train_steps",
]


@OTHER.same("attributes of a new callback")
def _(side):
    return values(side.callback()), values(side.callback(monitor="a", mode="max", save_top_k=3, filename="{a}"))


@OTHER.different("`best_model_path` before any training", lightning="", here="tiered://best?mode=max&monitor=score")
def _(side):
    return side.callback(monitor="score", mode="max").best_model_path


@OTHER.same("pickle and deepcopy, before and after a training")
def _(side):
    callback = side.callback(monitor="score", save_top_k=2)
    untrained = copy.deepcopy(callback)

    def copies_are_equal():
        copies = [pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)]
        return [values(each) == values(callback) for each in copies]

    found = [copies_are_equal()]
    side.fit(callback)
    found.append(copies_are_equal())
    side.fit(untrained, max_epochs=2)
    return found, side.of_callback(untrained)


@OTHER.same("`state_key`")
def _(side):
    return side.callback(monitor="a").state_key


@OTHER.different("keys of `state_dict` beyond Lightning's", lightning=[], here=["scores", "withheld"])
def _(side):
    callback = side.callback(monitor="score")
    side.fit(callback)
    known = "monitor best_model_score best_model_path current_score dirpath best_k_models"
    known += " kth_best_model_path kth_value last_model_path"
    state = callback.state_dict()
    assert set(known.split()) <= set(state)
    return sorted(set(state) - set(known.split()))


@OTHER.same("`load_state_dict` of the same dirpath, and of another")
def _(side):
    one = side.callback(monitor="score", save_top_k=2, save_last=True)
    side.fit(one)
    same = side.callback(monitor="score", save_top_k=2)
    same.load_state_dict(one.state_dict())
    other = side.callback(monitor="score", save_top_k=2, dirpath=side.path("other"))
    with pytest.warns(UserWarning, match="dirpath has changed"):
        other.load_state_dict(one.state_dict())
    return side.of_callback(same), side.of_callback(other)


@OTHER.same("two callbacks of one `state_key` are refused")
def _(side):
    with pytest.raises(RuntimeError) as caught:
        side.fit(side.callback(filename="a-{epoch}"), side.callback(filename="b-{epoch}"))
    return str(caught.value).replace("Tiered", "")


@OTHER.same("`save_weights_only`: what the files hold")
def _(side):
    side.train(save_weights_only=True)
    return [sorted(state) for state in side.load(*side.names())]


@OTHER.same("what whole checkpoints hold, hyperparameters included")
def _(side):
    class Named(Tiny):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

    side.train(fit={"model": Named()})
    [state] = side.load(*side.names())
    return sorted(state), dict(state["hyper_parameters"])


@OTHER.same("the callback runs after the others")
def _(side):
    class Another(Callback):
        pass

    trainer = side.trainer(side.callback(), Another())
    kept = [type(each).__name__.replace("Tiered", "") for each in trainer.callbacks]
    return [name for name in kept if name in ("Another", "ModelCheckpoint")]


@OTHER.same("`trainer.checkpoint_callback` and `checkpoint_callbacks`")
def _(side):
    first, second = side.callback(monitor="a"), side.callback(monitor="b")
    trainer = side.trainer(first, second, enable_checkpointing=True)
    return trainer.checkpoint_callback is first, trainer.checkpoint_callbacks == [first, second]


@OTHER.same("`enable_checkpointing=False` beside it is refused")
def _(side):
    with pytest.raises(Exception) as caught:
        side.trainer(side.callback(), enable_checkpointing=False)
    return type(caught.value).__name__, str(caught.value)


@OTHER.same("`trainer.save_checkpoint` below dirpath, also of weights alone")
def _(side):
    trainer = side.fit(side.callback())
    trainer.save_checkpoint(side.path("by/hand.ckpt"))
    trainer.save_checkpoint(side.path("weights.ckpt"), weights_only=True)
    trainer.strategy.teardown()
    return side.files(), [sorted(state) for state in side.load("by/hand.ckpt", "weights.ckpt")]


@OTHER.same('`trainer.save_checkpoint` after `test(ckpt_path="best")`')
def _(side):
    callback = side.callback(monitor="score")
    trainer = side.fit(callback)
    trainer.test(trainer.lightning_module, ckpt_path="best", verbose=False)
    trainer.save_checkpoint(side.path("tested.ckpt"))
    trainer.strategy.teardown()
    return side.files()


@OTHER.same("`trainer.save_checkpoint` to a local path elsewhere: a file")
def _(side):
    trainer = side.fit(side.callback())
    trainer.save_checkpoint(side.root / "elsewhere" / "hand.ckpt")
    trainer.strategy.teardown()
    return (side.root / "elsewhere" / "hand.ckpt").is_file()


@OTHER.different("`storage_options` of `trainer.save_checkpoint`", lightning="TypeError", here=["epoch=2-step=6.ckpt"])
def _(side):
    trainer = side.fit(side.callback())
    try:
        trainer.save_checkpoint(side.path("hand.ckpt"), storage_options={"tiers": ["memory"]})
    except TypeError as error:
        return type(error).__name__
    trainer.strategy.teardown()
    return side.names()


@OTHER.same("`verbose=True`: what is said of the top-k")
def _(side):
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("lightning.pytorch.callbacks.model_checkpoint.rank_zero_info", said.append)
        side.train(monitor="score", verbose=True, fit={"model": Tiny((5, 3, 4, 9, 2, 1))})
    return [text.replace(side.dirpath, "") for text in said]


@OTHER.different(
    "whether loggers hear of each file, and of the newest at the end", lightning=(True, True), here=(False, True)
)
def _(side):
    class Counting(CSVLogger):
        def after_save_checkpoint(self, callback):
            told.append(side.of_callback(callback))

    told = []
    callback = side.callback(save_last=True, save_top_k=-1)
    side.fit(callback, logger=Counting(str(side.root / "logs")))
    return len(told) == 6, told[-1] == side.of_callback(callback)


@OTHER.different("a trainer without callbacks", lightning="checkpoints", here="run")
def _(side):
    trainer = side.fit()
    return str(trainer.checkpoint_callback.dirpath).removeprefix(f"{side.root}/")
