"""Settings for support cases: one environment variable, read when a configuration is made, and kept with it."""

import pytest
from support.supporting import build, supported

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.support import VARIABLE, Support

S3 = {"dirpath": "s3://bucket/run"}


def test_a_configuration_keeps_what_the_variable_said_when_it_was_made(monkeypatch):
    assert TieredCheckpointConfig(**S3).support == Support()
    monkeypatch.setenv(VARIABLE, " wait_timeout_s=60, drain = thread,, pending_timeout_s=7 ")
    made = TieredCheckpointConfig(**S3)
    assert made.support == Support(wait_timeout_s=60, drain="thread", pending_timeout_s=7)
    monkeypatch.setenv(VARIABLE, "max_pending=9")
    changed = TieredCheckpointIO(made, memory_keep_last=5).config
    assert (changed.memory_keep_last, changed.support) == (5, made.support)
    # A process that reads it where it is stored, as the drain does, has another environment.
    stored = made.to_json()
    monkeypatch.delenv(VARIABLE)
    assert TieredCheckpointConfig.from_json(stored) == made
    assert made != TieredCheckpointConfig(**S3)


@pytest.mark.parametrize(
    ("text", "said", "allowed"),
    [
        ("wait_timeout=60", "unknown name 'wait_timeout'", "did you mean 'wait_timeout_s'?"),
        ("namespace=a", "unknown name 'namespace'", "known names: drain"),
        ("wait_timeout_s", "wait_timeout_s is ''", "1 to 604800"),
        ("wait_timeout_s=0", "wait_timeout_s is 0", "1 to 604800"),
        ("pending_timeout_s=1.5", "pending_timeout_s is '1.5'", "1 to 86400"),
        ("durable_timeout_s=-1", "durable_timeout_s is '-1'", "1 to 86400"),
        ("max_pending=many", "max_pending is 'many'", "1 to 1000"),
        ("drain=forked", "drain is 'forked'", "process, thread"),
    ],
)
def test_a_bad_variable_is_one_clear_error(monkeypatch, text, said, allowed):
    monkeypatch.setenv(VARIABLE, f"drain=thread,{text}")
    with pytest.raises(ConfigError) as caught:
        TieredCheckpointIO(**S3)
    assert str(caught.value).startswith(f"{VARIABLE}: {said}")
    assert allowed in caught.value.hint


@pytest.mark.parametrize("name", [*Support.__dataclass_fields__, "support"])
def test_none_of_them_is_a_key(name):
    for make in (TieredCheckpointIO.from_config, TieredCheckpointConfig.from_any):
        with pytest.raises(ConfigError, match=f"unknown key '{name}'"):
            make({**S3, name: 3})


def test_what_only_one_process_sees_is_uploaded_by_it():
    assert build(TieredCheckpointConfig, dirpath="memory://run", drain="process").support.drain == "thread"
    with supported(drain="process"):
        assert TieredCheckpointConfig(**S3).support.drain == "process"
