"""One catalogue, one collector: each exporter tells the same of a training, and of a node whose trainer is dead."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
from support.supporting import build
from support.training import Model
from typer.testing import CliRunner

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.metrics import recording
from tiered_checkpoint_io.metrics.catalog import CATALOG, PREFIX, Sample
from tiered_checkpoint_io.metrics.collect import Collector
from tiered_checkpoint_io.metrics.text import prometheus_text


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def values(root):
    """By name and the labels beside the namespace."""
    return {_key(each.metric.name, each.labels): each.value for each in Collector(root).collect()}


def _key(name, labels):
    return " ".join([name.removeprefix(PREFIX), *(value for key, value in labels.items() if key != "namespace")])


def parsed(text):
    """The same, of Prometheus' text."""
    found = re.findall(rf"^{PREFIX}(\w+)\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return {_key(name, dict(re.findall(r'(\w+)="(.*?)"', labels))): float(value) for name, labels, value in found}


def steady(found):
    """Without what changes as time goes."""
    return {key: value for key, value in found.items() if "seconds" not in key.split()[0] or key.endswith("total")}


def root_of(runs):
    (root,) = Path(runs.memory_dir).glob("tiered-*/*")
    return root


def test_names_of_metrics_follow_the_rules_of_prometheus():
    for each in CATALOG:
        assert re.fullmatch(rf"{PREFIX}[a-z_]+", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter")
        if each.unit not in ("", "steps"):
            assert each.unit in each.name


def test_a_dead_trainer_and_one_that_resumes(dead):
    root = root_of(dead)
    found = values(root)
    expected = {"running": 1, "step": 17, "memory_step": 15, "durable_step": 10, "steps_at_risk": 7}
    expected |= {"saves_total memory": 2, "saves_total durable": 1, "uploads_total": 1, "pending": 0, "quarantined": 0}
    assert found.items() >= expected.items()
    assert 0 < found["capture_seconds_total"] < found["stall_seconds_total"] < found["run_seconds"]
    assert found["uploaded_bytes_total"] > 1000
    assert 0 < found["durable_age_seconds"] < found["run_seconds"]
    assert 0 < time.time() - found["last_activity_timestamp_seconds"] < found["run_seconds"]
    assert found["used_bytes memory"] > 3000
    assert found["free_bytes memory"] > 0
    assert "replicated_step" not in found

    seen = {}

    class Asked(Model):
        def on_train_batch_end(self, *_):
            seen.setdefault("found", values(root))

    checkpoints = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10)
    dead.trainer([checkpoints], io=dead.io(), max_steps=20).fit(Asked(), ckpt_path="tiered:latest")
    found = seen["found"]
    assert (found["running"], found["step"], found["restores_total"], found["repeated_steps_total"]) == (1, 16, 1, 2)
    assert found["lost_seconds_total repeated_steps"] > 0
    ended = steady(values(root))
    assert (ended["running"], ended["step"], ended["durable_step"], ended["steps_at_risk"]) == (0, 20, 20, 0)


def test_a_long_validation_is_no_silence(runs, monkeypatch):
    monkeypatch.setattr(recording, "_STEP_EVERY_S", 0)

    class Validated(Model):
        validation_step = Model.test_step
        val_dataloader = Model.train_dataloader

    trainer = runs.trainer([TieredModelCheckpoint()], max_steps=1, limit_val_batches=3, val_check_interval=1)
    trainer.fit(Validated())
    assert [each["step"] for each in read_events(root_of(runs)) if each["event"] == "step"] == [1] * 4


def test_status_prints_and_writes_prometheus_text(dead, tmp_path):
    where = ("status", "--memory-dir", dead.memory_dir, "--prometheus")
    found = parsed(command(*where).stdout)
    assert (found["step"], found.keys()) == (17, values(root_of(dead)).keys())
    told = tmp_path / "x.prom"
    for _ in range(2):
        done = command(*where, "--textfile", str(told))
        assert (done.exit_code, done.stdout, os.listdir(tmp_path).count("x.prom")) == (0, "", 1)
    assert parsed(told.read_text()).keys() == found.keys()
    assert not [each for each in os.listdir(tmp_path) if each.startswith(".x.prom")]
    refused = command(*where, "--textfile", str(tmp_path / "none" / "x.prom"))
    assert isinstance(refused.exception, ConfigError)
    for wrong in (("--json",), ("--textfile", "")):
        assert command(*where, *wrong).exit_code == 2
    assert command("status", "--memory-dir", dead.memory_dir, "--textfile", "x").exit_code == 2


def test_the_text_is_what_prometheus_reads():
    """Also a namespace with letters that end a label, and the series of one metric together."""
    parser = pytest.importorskip("prometheus_client.parser")
    names = ['a"b', "c\\d", "e\nf"]
    samples = [Sample(metric, 1.5, {"namespace": name}) for name in names for metric in CATALOG if not metric.labels]
    families = list(parser.text_string_to_metric_families(prometheus_text(samples)))
    assert len(families) == len({each.name for each in families}) == len(samples) / 3
    assert all([each.labels["namespace"] for each in family.samples] == names for family in families)


def test_the_cost_of_a_look_is_small(dead):
    """Beside training, once in 15 s; of a record of full length."""
    root = root_of(dead)
    collector = Collector(root)
    collector.collect()
    began = time.process_time()
    for _ in range(10):
        collector.collect()
    assert (time.process_time() - began) / 10 < 0.1


@pytest.mark.parametrize("kind", ["sharded", pytest.param("local", marks=pytest.mark.matrix)])
def test_a_loop_with_plain_dcp(kind, memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread", "kind": kind}
    for step in (1, 2):
        build(dcp.save, {"w": torch.full((8,), float(step))}, checkpoint_id=f"step_{step}", step=step, **options)
    state = {"w": torch.zeros(8)}
    build(dcp.load, state, **options).close()
    assert state["w"][0] == 2
    (root,) = Path(memory_dir).glob("tiered-*/*")
    found = values(root)
    expected = {
        "running": 1,
        "step": 2,
        "memory_step": 2,
        "durable_step": 2,
        "restores_total": 1,
        "saves_total durable": 2,
    }
    assert found.items() >= expected.items()
    assert found["lost_seconds_total restore"] > 0
