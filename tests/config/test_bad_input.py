"""Bad input of a user: one clear error that says what to do, in time, and nothing is lost."""

import time

import pytest
import torch
from support.bad_input import KEPT, Kept, state
from support.clocks import hurried
from support.failing import failing
from support.supporting import build
from support.training import Model, Runs

from tiered_checkpoint_io import TieredStorageWriter
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError, SaveError

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def kept_on_s3(s3_url, memory_dir):
    kept = Kept(s3_url, memory_dir)
    yield kept
    kept.close()
    kept.still_loads()


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        # Neither in the environment, nor in files, nor from a metadata service, which the server's own rule out.
        (None, "NoCredentialsError.*environment, profile or role"),
        ("not-it", "SignatureDoesNotMatch.*credentials are wrong or have expired"),
    ],
)
def test_no_credentials_and_wrong_ones(kept_on_s3, monkeypatch, secret, said):
    with monkeypatch.context() as env:
        for key in KEYS if secret is None else ():
            env.delenv(key)
        if secret is not None:
            env.setenv(KEYS[1], secret)
        io, started = kept_on_s3.io(), time.monotonic()
        assert io.load_checkpoint("tiered:latest")["global_step"] == 1
        with failing("credentials", match=said) as caught:
            io.load_checkpoint("nowhere.ckpt")
        assert not caught.value.retryable
        with pytest.raises(SaveError, match=rf"in memory, but not on the durable tier.*{said}"):
            io.save_checkpoint(state(2), "epoch=0-step=2.ckpt")
        with pytest.raises(SaveError, match=rf"{said}.*stays in node memory; .* tiered-ckpt flush --namespace "):
            io.teardown()
        assert time.monotonic() - started < 30
    kept_on_s3.mended(2)


def test_a_trainer_refuses_what_no_trainer_saved_and_its_advice_works(memory_dir, tmp_path):
    class Warm(Model):
        def on_fit_start(self):
            self.loaded = self.trainer.strategy.checkpoint_io.load_checkpoint(KEPT)

    runs, callback = Runs(str(tmp_path / "durable"), memory_dir, tmp_path), TieredModelCheckpoint()
    (io := runs.io()).save_checkpoint(state(1), KEPT)
    io.teardown()
    for ckpt_path in (KEPT, "tiered:latest"):
        with pytest.raises(RestoreError, match=f"^{KEPT} was not saved by a Trainer.*load its weights by Tiered.*"):
            runs.fit(callback, ckpt_path=ckpt_path)
    assert runs.fit(callback, model=Warm(), ckpt_path=None, max_steps=2)[1].loaded["global_step"] == 1
    assert runs.fit(callback, max_steps=3)[0].global_step == 3


def test_bad_names_and_options_are_refused_and_nothing_is_saved(kept, tmp_path):
    io = kept.io()
    outside = ("../x.ckpt", "a/../../x.ckpt", f"{io.config.dirpath}/../x.ckpt", "/../abs.ckpt")
    itself = (io.config.dirpath, f"{io.config.dirpath}/")
    for name in (*outside, *itself, "s3://other/x.ckpt", "", "a//b", ".tiered/x", "a\nb", "a\\b", "x" * 300):
        with pytest.raises(ConfigError) as caught:
            io.save_checkpoint(state(2), name)
        assert "dirpath" in caught.value.hint
    for name in ("part.json", "a/drained", ".drained", "pinned", "replicated"):
        with pytest.raises(ConfigError, match=r"its own files.*such as '\.ckpt'"):
            io.save_checkpoint(state(2), name)
    # No command would take such a name: it is a sentinel.
    writer = build(TieredStorageWriter, **kept.options, **kept.support)
    for act in (
        lambda: io.save_checkpoint(state(2), "tiered:x.ckpt"),
        lambda: io.save_checkpoint(state(2), f"{io.config.dirpath}/tiered:x.ckpt"),
        lambda: io.checkpointer.alias("tiered:x.ckpt", KEPT),
        lambda: writer.reset("tiered:x/step_2"),
    ):
        with pytest.raises(ConfigError, match="begins with 'tiered:'.*give it another name"):
            act()
    wrong = ({"tier": ["memory"]}, {"tiers": ["disk"]}, {"tiers": []}, {"metric": ("x", torch.ones(2))})
    for options in wrong:
        with pytest.raises(ConfigError, match="allowed: "):
            io.save_checkpoint(state(2), "a.ckpt", storage_options=options)
    for load in (io.load_checkpoint, io.remove_checkpoint):
        with pytest.raises(ConfigError):
            load(f"{io.config.dirpath}/../../x.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="a.ckpt.*tiered-ckpt ls"):
        io.load_checkpoint("a.ckpt")
    choices = "allowed: tiered:latest, tiered:last, tiered://best.*, a name, a path or a URL"
    for wrong in ("tiered:best", "latest"):
        with pytest.raises(CheckpointNotFoundError, match=f"'{wrong}'.*{choices}"):
            io.load_checkpoint(wrong)
    with pytest.raises(ConfigError, match=f"^'tiered://latest' stands for no checkpoint — {choices}$"):
        io.load_checkpoint("tiered://latest")
    with pytest.raises(ConfigError, match="'tiered://latest' is not the name of a checkpoint — give a name, or"):
        io.save_checkpoint(state(2), "tiered://latest")
    assert io.load_checkpoint("tiered:latest")["global_step"] == 1
    assert not list(tmp_path.rglob("x.ckpt"))


@pytest.fixture
def unreachable(monkeypatch):
    """Makes an endpoint without a server, and shortens the bound, by default two minutes."""
    for key in KEYS:
        monkeypatch.setenv(key, "x")
    with hurried(retry_deadline_s=0.2, retry_first_wait_s=0.05, retry_max_wait_s=0.2):
        yield {"dirpath": "s3://bucket/run", "namespace": "away", "endpoint_url": "http://127.0.0.1:9"}


def test_unreachable_is_an_error_never_a_start_from_scratch(unreachable, memory_dir, tmp_path):
    runs = Runs(unreachable["dirpath"], memory_dir, tmp_path)
    for name in ("tiered:latest", "tiered:last", "tiered://best?mode=min&monitor=loss", "a.ckpt"):
        with failing("unavailable", match="EndpointConnectionError.*check endpoint_url and the network"):
            runs.io(**unreachable).load_checkpoint(name)
    for ckpt_path in ("tiered:latest", "last", "best"):
        model = Model()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        callback = TieredModelCheckpoint(s3_every_n_train_steps=5, monitor="loss")
        with failing("unavailable", match="check endpoint_url and the network"):
            runs.fit(callback, io=runs.io(**unreachable), model=model, ckpt_path=ckpt_path)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Memory carries it on.
    io = runs.io(**unreachable)
    io.save_checkpoint(state(4), "a.ckpt", storage_options={"tiers": ["memory"]})
    assert io.load_checkpoint("tiered:latest")["global_step"] == 4
    io.teardown()
