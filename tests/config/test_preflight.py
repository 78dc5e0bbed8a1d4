"""Preflight before the first batch: one error if no retry can help, else a warning."""

import contextlib
import logging
import secrets

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.clocks import hurried
from support.fault_proxy import in_region, refuse, stall, where
from support.iam import Judge, policy
from support.tenants import mounted_tmpfs
from support.training import Model, Runs

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.preflight import Need, preflight
from tiered_checkpoint_io.errors import MemoryTierError, TieredCheckpointError
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
DENIED = refuse(403, "AccessDenied")
#: 12 MiB of buffers: more than a part of 8 MiB.
LARGE = 3 << 20
NEED = Need(1000, 4 * LARGE, memory_steps=True, durable_steps=True)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def patient():
    """Makes preflight wait for a slow machine's server."""
    with hurried(preflight_s=60.0):
        yield


@pytest.fixture
def runs(s3_url, memory_dir, tmp_path):
    return Runs(s3_url, memory_dir, tmp_path)


class Said(logging.Handler):
    """The warnings of a training."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.logger = logging.getLogger(f"job-{secrets.token_hex(4)}")
        self.logger.addHandler(self)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def fit(runs, *, memory_steps=True, ballast=0, ckpt_path=None, callback=None, **options):
    """Trains three steps with only memory steps; returns the trainer, its error and its warnings."""
    said, model = Said(), Model(ballast=ballast)
    options = {"wait_timeout_s": 20, "save_on_train_end": False, "drain": "thread", **options}
    callback = callback or TieredModelCheckpoint(memory_every_n_train_steps=1, save_top_k=0)
    trainer = runs.trainer(
        [callback] if memory_steps else [],
        io=runs.io(logger=said.logger, **options),
        max_steps=3,
        enable_checkpointing=memory_steps,
    )
    try:
        trainer.fit(model, ckpt_path=ckpt_path)
    except Exception as error:
        return trainer, error, said.lines
    return trainer, None, said.lines


def tried(runs, **options):
    """Tries what a training needs, without one; returns the error and the warnings."""
    said, error = Said(), None
    io = runs.io(logger=said.logger, chunk_size_MB=8, **options)
    try:
        preflight(io.checkpointer.session, NEED)
    except TieredCheckpointError as raised:
        error = raised
    io.teardown()
    return error, said.lines


def probes(runs):
    store = open_store(TieredCheckpointConfig(dirpath=runs.dirpath))
    try:
        return [entry.key for entry in store.list(".tiered/preflight/")]
    finally:
        store.close()


def test_an_error_comes_before_the_first_batch_whatever_a_failed_save_does(runs, proxy):
    proxy.plan = where(DENIED)
    trainer, error, _ = fit(runs, on_save_error="warn", ballast=LARGE, endpoint_url=proxy.endpoint_url)
    assert (error.reason, error.operation, trainer.global_step) == ("access", "list, put", 0)
    assert error.message.startswith("preflight: ")
    assert "preflight: warn" in error.hint
    trainer, error, _ = fit(runs, memory_dir=str(runs.root / "nowhere"))
    assert (type(error), error.key, trainer.global_step) == (MemoryTierError, str(runs.root / "nowhere"), 0)


#: A wrong setup: its options, the error's reason, its operation, and a text of its hint.
WRONG = {
    "no bucket": ({"dirpath": "s3://no-such-bucket-here/run"}, "config", "list", "does not exist there"),
    "no credentials": ({"without": CREDENTIALS}, "credentials", "list, put", "environment, profile or role"),
    "no profile": ({"profile": "nobody"}, "config", "connect", "check profile"),
    "a wrong region": (
        {"plan": in_region("eu-central-1"), "region": "us-west-2"},
        "config",
        "list",
        "set region and endpoint_url",
    ),
    **{
        f"no right to {name}": ({"plan": where(DENIED, operation=name)}, "access", name, right)
        for name, right in {
            "list": "s3:ListBucket",
            "put": "s3:PutObject",
            "get": "s3:GetObject",
            "delete": "s3:DeleteObject",
            "create": "s3:PutObject",
            "abort": "s3:AbortMultipartUpload",
        }.items()
    },
}


@pytest.mark.parametrize("setup", WRONG)
def test_what_no_retry_can_mend_is_an_error_that_names_it(setup, runs, proxy, monkeypatch):
    changes, reason, operation, hint = WRONG[setup]
    options = {"endpoint_url": proxy.endpoint_url, **changes}
    proxy.plan = options.pop("plan", proxy.plan)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with monkeypatch.context() as env:
        for name in options.pop("without", ()):
            env.delenv(name)
        error, _ = tried(runs, **options)
    assert (error.reason, error.operation) == (reason, operation)
    assert error.key.startswith(options.get("dirpath", runs.dirpath))
    assert hint in error.hint
    # Only objects that may not be deleted stay there, and the error names them.
    assert all(key in error.message for key in probes(runs))
    assert proxy.counts["part"] == 0


def test_memory_too_small_is_an_error_only_where_nothing_can_be_saved(runs, tmp_path):
    with mounted_tmpfs(tmp_path / "tight", 8 << 20) as folder:
        small = {"memory_dir": str(folder), "ballast": LARGE, "spill_dir": None}
        trainer, error, _ = fit(runs, **small)
        assert type(error) is MemoryFullError
        assert "parameters and buffers alone take 12.00 MiB; memory can hold 8.00 MiB" in error.message
        assert (error.operation, error.key, trainer.global_step) == ("save", str(folder), 0)
        assert "spill_dir" in error.hint
        # A named spill, which is made if it is missing, holds memory-only steps, too.
        trainer, error, said = fit(runs, **{**small, "spill_dir": str(tmp_path / "disk" / "spill")})
        assert (error, trainer.global_step) == (None, 3)
        assert list((tmp_path / "disk").glob("spill/*/*/saves/*/rank-00000/part.json"))
        assert not [line for line in said if "preflight" in line]
        # Before it is needed.
        (tmp_path / "file").touch()
        for spill in ("file", "file/spill"):
            error, _ = tried(runs, spill_dir=str(tmp_path / spill))
            assert type(error) is MemoryTierError
            assert f"spill_dir is {tmp_path / spill}, where this user may not write" in error.message
        # A spill holds durable saves only, unless it is named.
        both = TieredModelCheckpoint(memory_every_n_train_steps=1, s3_every_n_train_steps=3)
        trainer, error, said = fit(runs, callback=both, namespace="both", **{**small, "spill_dir": "auto"})
        assert (error, trainer.global_step) == (None, 3)
        (line,) = (line for line in said if "preflight" in line)
        assert "steps of memory alone are skipped" in line
        assert runs.durable() == ["epoch=0-step=3.ckpt"]


def test_preflight_warn_and_off(runs, proxy):
    proxy.plan = where(DENIED)
    trainer, error, said = fit(runs, memory_steps=False, endpoint_url=proxy.endpoint_url, preflight="warn")
    assert (error, trainer.global_step) == (None, 3)
    (line,) = said
    assert line.startswith("preflight: S3 list failed (AccessDenied, HTTP 403); S3 put failed")
    assert "training continues, unless ckpt_path needs an answer from there: " in line
    proxy.counts.clear()
    trainer, error, said = fit(runs, memory_steps=False, endpoint_url=proxy.endpoint_url, preflight="off")
    assert (error, trainer.global_step, said, dict(proxy.counts)) == (None, 3, [], {})


def test_a_restart_after_a_role_was_changed_continues_from_memory(runs, proxy):
    """The job may only read when it comes back, and its memory holds a checkpoint."""
    reached = {"endpoint_url": proxy.endpoint_url, "drain": "thread"}
    assert fit(runs, **reached)[1] is None
    proxy.plan = Judge(policy({"s3:GetObject", "s3:ListBucket"})).plan
    again = TieredModelCheckpoint(memory_every_n_train_steps=1, s3_every_n_train_steps=4)
    said = Said()
    io = runs.io(logger=said.logger, wait_timeout_s=3, save_on_train_end=False, **reached)
    trainer, _ = runs.fit(again, io=io, max_steps=6)
    assert (trainer.global_step, io.checkpointer.restored.step) == (6, 3)
    (line,) = (line for line in said.lines if "preflight" in line)
    assert "S3 put failed (AccessDenied, HTTP 403)" in line
    assert "training continues, because node memory holds a checkpoint to resume from" in line
    # The error repeats: a later save shows that the upload failed.
    (line, *_) = (line for line in said.lines if "epoch=0-step=4.ckpt did not reach the durable tier" in line)
    assert "AccessDenied" in line
    # If the restart itself would fail, this is an error, even with a checkpoint in memory.
    proxy.plan = where(DENIED, operation="list")
    assert tried(runs, **reached)[0].operation == "list"
    # Another node, whose memory holds nothing, is refused.
    runs.wipe()
    proxy.plan = where(DENIED, operation="put")
    assert tried(runs, **reached)[0].operation == "put"


@pytest.mark.parametrize("server", ["silent", "away", "busy", "a program for credentials"])
def test_what_may_pass_is_one_warning_with_the_deadline(server, runs, proxy, tmp_path, monkeypatch):
    endpoint = proxy.endpoint_url if server != "away" else "http://127.0.0.1:9"
    proxy.plan = where({"silent": stall, "busy": refuse(503, "SlowDown")}.get(server))
    ends = tmp_path / "ends"
    if server == "a program for credentials":
        for name in CREDENTIALS:
            monkeypatch.delenv(name)
        command = f"sh -c 'while ! [ -e {ends} ]; do sleep 0.05; done'"
        (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    expected = {"away": "EndpointConnectionError", "busy": "SlowDown"}.get(server, "has not answered for 1 s")
    with hurried(preflight_s=1.0 if "not answered" in expected else 60.0):
        error, said = tried(runs, endpoint_url=endpoint, pending_timeout_s=7)
    ends.touch()
    (line,) = said
    assert (error, line.startswith("preflight: "), expected in line) == (None, True, True), line
    assert "unless ckpt_path needs an answer from there: a save waits at most 7 s for the durable tier" in line


def test_not_asking_for_the_checkpoint_that_is_there_is_one_warning(runs):
    def hints(said):
        return [line for line in said if "ckpt_path" in line]

    callback = TieredModelCheckpoint(memory_every_n_train_steps=1, s3_every_n_train_steps=2)
    trainer, error, said = fit(runs, callback=callback)
    assert (error, hints(said)) == (None, [])
    # Its own checkpoints are no news to a trainer.
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(Model())
    assert hints(said) == []
    assert hints(fit(runs, ckpt_path="tiered:latest", memory_steps=False)[2]) == []
    (line,) = hints(fit(runs, memory_steps=False)[2])
    assert "ckpt_path='tiered:latest' would resume from memory/epoch=1-step=5.ckpt (step 5, memory tier)" in line
    runs.wipe()
    (line,) = hints(fit(runs, memory_steps=False, namespace=f"other-{secrets.token_hex(2)}")[2])
    assert "would resume from epoch=1-step=4.ckpt (step 4, durable tier)" in line
    assert probes(runs) == []


@pytest.mark.parametrize(
    "stock", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["ours", "Lightning's own"]
)
def test_last_that_is_not_found_is_one_warning_that_names_the_newest(stock, runs):
    """Else a script that resumes from "last" would start from scratch each time, without a word of what is there."""
    make = ModelCheckpoint if stock else TieredModelCheckpoint
    assert fit(runs, callback=make(every_n_train_steps=2, save_last=stock))[1] is None
    with contextlib.ExitStack() as warned:
        if stock:
            warned.enter_context(pytest.warns(UserWarning, match="there is no last checkpoint available"))
        trainer, error, said = fit(runs, ckpt_path="last", callback=make(every_n_train_steps=2, save_last=stock))
    assert (error, trainer.global_step) == (None, 3)
    (line,) = (line for line in said if "ckpt_path" in line)
    assert "so training does not resume; ckpt_path='tiered:latest' would resume from" in line
    assert ("or with 'last', which Lightning's own ModelCheckpoint can't find there" in line) == stock
    assert ("there is no last checkpoint (save_last is off" in line) != stock
