"""Several ranks: real processes, as Lightning launches them."""

import pytest
from support.as_lightning import INSTALLED
from support.training import durable

pytestmark = pytest.mark.timeout(360)
#: Defaults of TieredModelCheckpoint.
PLAIN = {"monitor": None, "mode": "min", "save_top_k": 1, "save_last": False}
EVERY = {"memory_every_n_train_steps": 1, "s3_every_n_train_steps": 2}


@pytest.mark.matrix
def test_spawned_ranks_take_the_io_and_the_callback_by_pickle(launched, tmp_path):
    done = launched(strategy="ddp_spawn", steps=5, config=EVERY, callback=PLAIN)
    assert done.returncode == 0, done.stderr
    assert durable(str(tmp_path / "durable")) == ["end_of_training.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize(
    ("job", "error"),
    [
        # Only rank 0 looks whether a name is taken; the other ranks wait for its answer.
        ({"callback": {"filename": "../{step}"}}, "ConfigError: "),
        pytest.param({"config": {"preflight": "error"}}, "StoreError: preflight: ", marks=pytest.mark.matrix),
        pytest.param({"config": {"preflight": "off"}}, "SaveError: ", marks=pytest.mark.matrix),
    ],
    ids=["a name", "preflight", "a save"],
)
def test_an_error_of_rank_0_ends_all_ranks(job, error, fits, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    if "config" in job:
        job["config"]["enable_async_checkpointing"] = False
        job["dirpath"] = str(tmp_path / "file" / "run")
    (answers,) = fits({"steps": 4, **job}, strategy="ddp", fails=True)
    assert all(answer["error"].startswith(error) for answer in answers), answers


@pytest.mark.skipif(INSTALLED < (2, 6), reason="save_on_exception is an argument of lightning 2.6")
def test_a_rank_that_fails_alone_says_why_before_it_waits_and_rank_0_saves(fits, tmp_path):
    job = {"config": EVERY, "callback": {"save_on_exception": True}, "raises": 1}
    (answers,) = fits({"steps": 8, **job}, strategy="ddp", fails=True)
    assert answers[1]["error"] == "ValueError: a bug of one rank"
    log = (tmp_path / "log-1.txt").read_text()
    assert 0 < log.find("training failed on this rank: a bug of") < log.find("the ranks do not save together")
    assert "epoch=0-step=5.ckpt" in durable(str(tmp_path / "durable"))


def test_ranks_whose_names_differ_go_on_together(fits, tmp_path):
    """A value that is not synchronised is in a name, or rates: on one rank it stays the same, on the other it changes."""
    best = {"mode": "max", "save_top_k": 2}
    cases = [
        ({"name_last": "last-{own:.1f}"}, {"save_last": True}, ["last-own=0.0.ckpt", "step=6.ckpt"]),
        ({}, {"filename": "{own:.1f}"}, ["own=0.0.ckpt"]),
        ({"same_on": 1}, {"filename": "{own:.1f}", "monitor": "step", **best}, ["own=3.0.ckpt", "own=5.0.ckpt"]),
        ({"same_on": 1}, {"monitor": "own", **best}, ["step=4.ckpt", "step=6.ckpt"]),
    ]
    jobs = [
        {"dirpath": str(tmp_path / str(number)), "callback": {**PLAIN, **callback}, **job}
        for number, (job, callback, _) in enumerate(cases)
    ]
    answers = fits(*jobs, strategy="ddp", steps=6, config=EVERY)
    assert [first["durable"] for first, _ in answers] == [saved for *_, saved in cases]
