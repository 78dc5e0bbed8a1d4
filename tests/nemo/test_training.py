"""NeMo trainings on one device: a user's configuration, crashes, resumes, exports."""

import tarfile
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from support.nemo_training import Model, callback_of, io_of, restored, same_weights

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.nemo import S3CheckpointIO, S3Utils, tiered_exp_manager


def params(**changes):
    return {"exp_manager": {"checkpoint_callback_params": changes}}


@pytest.mark.parametrize("way", ["drop-in", "connector", "tiered"])
def test_a_training_that_crashed_goes_on_and_ends_as_if_it_had_not(runs, way, tmp_path):
    _, whole = runs.fit(way=way, max_steps=20)
    again = type(runs)(runs.dirpath + "-2", runs.memory_dir, tmp_path / "logs-2", namespace="second")
    again.fit(way=way, max_steps=20, stop_at=13)
    again.wipe()
    trainer, module = again.fit(way=way, max_steps=20)
    assert restored(trainer) == ("gpt--val_loss=1.00-step=10.ckpt", 10, "durable")
    assert min(module.seen) == 10
    assert same_weights(module, whole)
    assert again.durable() == runs.durable()
    assert isinstance(io_of(trainer), S3CheckpointIO)
    # No file goes to a local folder with the bucket's name.
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("best", [False, True])
def test_the_nemo_file_lies_at_the_durable_tier_and_opens(runs, best, tmp_path):
    settings = params(save_nemo_on_train_end=True, save_best_model=best, prefix="mine")
    runs.fit(settings, max_steps=6)
    trainer, module = runs.fit(settings, max_steps=16)
    assert [key for key in runs.objects() if key.endswith(".nemo")] == ["mine.nemo"]
    S3Utils.download_s3_file_to_path(f"{runs.dirpath}/mine.nemo", tmp_path / "got.nemo")
    with tarfile.open(tmp_path / "got.nemo") as tar:
        (weights,) = (name for name in tar.getnames() if name.endswith(".ckpt"))
        state = torch.load(tar.extractfile(weights))
    saved = io_of(trainer).load_checkpoint(callback_of(trainer).best_model_path)["state_dict"]
    io_of(trainer).teardown()
    assert torch.equal(state["layer.weight"], saved["layer.weight"]) == best
    assert torch.equal(state["layer.weight"], module.layer.weight)
    assert not (tmp_path / "s3:").exists()


def test_nemos_averages_are_refused(runs):
    with pytest.raises(ConfigError, match=r"NeMo's EMA is not supported.*leave exp_manager\.ema out"):
        runs.fit({"exp_manager": {"ema": {"enable": True, "decay": 0.5}}}, way="tiered")


# ------------------------------------------------------------------------------------ configuration
def test_what_the_block_says_holds(runs):
    block = {"memory_every_n_train_steps": 2, "s3_every_n_train_steps": 4, "namespace": "of-the-block"}
    runs.fit({"s3_checkpointing": block}, params(monitor="step", mode="max"), way="tiered", max_steps=9, stop_at=7)
    trainer, _ = runs.fit({"s3_checkpointing": block}, params(monitor="step", mode="max"), way="tiered", max_steps=9)
    assert restored(trainer)[1:] == (6, "memory")
    config = io_of(trainer).config
    assert (config.namespace, config.max_read_concurrency, config.chunk_size_MB) == ("of-the-block", 15, 64)


def test_bad_configurations_are_errors(runs):
    with pytest.raises(ConfigError, match=r"unknown key 'max_write_concurency'.*did you mean 'max_write_concurrency'"):
        runs.fit({"s3_checkpointing": {"max_write_concurency": 3}}, way="tiered")
    with pytest.raises(ConfigError, match="dirpath"):
        runs.fit(params(dirpath=None), way="tiered")
    with pytest.raises(ConfigError, match="the configuration is a Namespace"):
        tiered_exp_manager(runs.bare(), Namespace(**runs.config()))
    trainer = runs.trainer(runs.config())
    with pytest.raises(Exception, match="create_checkpoint_callback"):
        tiered_exp_manager(trainer, OmegaConf.create(runs.config()))

    class Other(S3CheckpointIO.__mro__[3]):
        save_checkpoint = load_checkpoint = remove_checkpoint = None

    trainer.strategy.checkpoint_io = Other()
    with pytest.raises(ConfigError, match="tiered_exp_manager with a Other"):
        tiered_exp_manager(trainer, OmegaConf.create(runs.config()))


def test_a_block_that_says_other_than_the_trainers_io_is_refused(runs):
    config = runs.config({"s3_checkpointing": {**runs.io, "dirpath": runs.dirpath}})
    io = S3CheckpointIO(runs.dirpath, 64, 15, 10, **runs.io)
    tiered_exp_manager(runs.bare(plugins=[io]), OmegaConf.create(config))
    config["s3_checkpointing"]["on_save_error"] = "warn"
    with pytest.raises(ConfigError, match=r"s3_checkpointing.on_save_error is 'warn', and 'raise' in the trainer's S3"):
        tiered_exp_manager(runs.bare(plugins=[io]), OmegaConf.create(config))


def test_trainers_of_others_are_left_to_nemo(tmp_path, runs):
    """exp_manager in the same process, for a trainer with a stock checkpoint IO."""
    from lightning.pytorch import Trainer
    from nemo.utils.callbacks import NeMoModelCheckpoint
    from nemo.utils.exp_manager import exp_manager

    trainer = Trainer(max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, val_check_interval=5,
                      num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    config = runs.config(params(dirpath=str(tmp_path / "local")))["exp_manager"]
    exp_manager(trainer, config)
    assert type(callback_of(trainer)) is NeMoModelCheckpoint
    trainer.fit(Model(OmegaConf.create(runs.config()["model"]), trainer))
    assert (tmp_path / "local" / "gpt--val_loss=6.00-step=5-last.ckpt").is_file()
