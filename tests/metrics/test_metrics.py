"""``status --prometheus``: metrics of a training, and of a dead one; the dashboard and the alert rules."""

import csv
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.documented import command
from support.supporting import build
from support.tenants import mounted_tmpfs
from support.training import Model, Runs

from tiered_checkpoint_io import TieredCheckpointIO, dcp
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.metrics import CATALOG, PREFIX, Sample, prometheus_text

MIB = 1 << 20


@pytest.fixture
def runs(tmp_path, memory_dir):
    return Runs(str(tmp_path / "durable"), memory_dir, tmp_path)


@pytest.fixture
def dead(runs):
    """Returns a job that died at step 17, after a durable checkpoint of step 10 and one of step 15 in memory."""
    checkpoints = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10)
    runs.fit(checkpoints, stop_at=17, max_steps=20)
    return runs


def values(memory_dir):
    """Returns the metrics' values, by name and the label other than the namespace."""
    text = command("status", "--memory-dir", memory_dir, "--prometheus").stdout
    found = re.findall(rf"^{PREFIX}(\w+)\{{namespace=\".*?\"(?:,\w+=\"(.*?)\")?\}} (\S+)$", text, re.MULTILINE)
    return {f"{name} {label}".strip(): float(value) for name, label, value in found}


def root_of(memory_dir):
    (root,) = Path(memory_dir).glob("tiered-*/*")
    return root


def test_names_of_metrics_follow_the_rules_of_prometheus():
    for each in CATALOG:
        assert re.fullmatch(rf"{PREFIX}[a-z_]+", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter")


def test_a_dead_trainer_and_one_that_resumes(dead):
    found = values(dead.memory_dir)
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
            seen.setdefault("found", values(dead.memory_dir))

    checkpoints = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10)
    dead.trainer([checkpoints], io=dead.io(), max_steps=20).fit(Asked(), ckpt_path="tiered:latest")
    found = seen["found"]
    assert (found["running"], found["step"], found["restores_total"], found["repeated_steps_total"]) == (1, 16, 1, 2)
    assert found["lost_seconds_total repeated_steps"] > 0
    ended = values(dead.memory_dir)
    assert (ended["running"], ended["step"], ended["durable_step"], ended["steps_at_risk"]) == (0, 20, 20, 0)


def test_a_long_validation_is_no_silence(runs, monkeypatch):
    monkeypatch.setattr("tiered_checkpoint_io.metrics.STEP_EVERY_S", 0)

    class Validated(Model):
        validation_step = Model.test_step
        val_dataloader = Model.train_dataloader

    trainer = runs.trainer([TieredModelCheckpoint()], max_steps=1, limit_val_batches=3, val_check_interval=1)
    trainer.fit(Validated())
    assert [each["step"] for each in read_events(root_of(runs.memory_dir)) if each["event"] == "step"] == [1] * 4


def test_status_prints_and_writes_prometheus_text(dead, tmp_path):
    where = ("status", "--memory-dir", dead.memory_dir, "--prometheus")
    told = tmp_path / "x.prom"
    for _ in range(2):
        done = command(*where, "--textfile", str(told))
        assert (done.exit_code, done.stdout, os.listdir(tmp_path).count("x.prom")) == (0, "", 1)
    assert len(told.read_text().splitlines()) == len(command(*where).stdout.splitlines())
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
    samples = [Sample(metric, 1.5, {"namespace": name}) for name in names for metric in CATALOG if not metric.label]
    families = list(parser.text_string_to_metric_families(prometheus_text(samples)))
    assert len(families) == len({each.name for each in families}) == len(samples) / 3
    assert all([each.labels["namespace"] for each in family.samples] == names for family in families)


@pytest.mark.parametrize("kind", ["sharded", pytest.param("local", marks=pytest.mark.matrix)])
def test_a_loop_with_plain_dcp(kind, memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread", "kind": kind}
    for step in (1, 2):
        build(dcp.save, {"w": torch.full((8,), float(step))}, checkpoint_id=f"step_{step}", step=step, **options)
    state = {"w": torch.zeros(8)}
    build(dcp.load, state, **options).close()
    assert state["w"][0] == 2
    found = values(memory_dir)
    expected = {"running": 1, "step": 2, "memory_step": 2, "durable_step": 2, "restores_total": 1}
    expected |= {"saves_total durable": 2}
    assert found.items() >= expected.items()
    assert found["lost_seconds_total restore"] > 0


def test_space_is_that_of_the_trainer_whatever_the_limits_of_the_command(tmp_path, monkeypatch):
    """Two checkpoints of 8 MiB in a tmpfs for three: a slot that waits for the next save is free."""
    with mounted_tmpfs(tmp_path / "small", 26 * MIB) as small, mounted_tmpfs(tmp_path / "spill", 10 * MIB) as spilled:
        options = {"dirpath": str(tmp_path / "durable"), "memory_dir": str(small), "spill_dir": str(spilled)}
        io = TieredCheckpointIO(**options, memory_keep_last=2, memory_allocation_percentage=95)
        for step in range(1, 5):
            state = {"w": torch.full((2 * MIB,), float(step)), "global_step": step}
            io.checkpointer.save(state, f"step={step}.ckpt", tiers={"memory"}, wait=False)
        found = values(small)
        assert found["used_bytes memory"] / MIB == pytest.approx(16, abs=1)
        assert found["free_bytes memory"] / MIB >= 8, "nothing was skipped, and nothing will be"
        assert found["pending"] == 0
        # In a sidecar, whose own memory is small.
        monkeypatch.setattr(node, "memory_limit", lambda *_: 2 * MIB)
        assert values(small)["free_bytes memory"] == found["free_bytes memory"]
        shutil.rmtree(root_of(small))
        assert values(small) == {}
        io.teardown()


def test_a_logger_of_lightnings_gets_the_metrics_of_saves_and_uploads(runs, tmp_path):
    callback = TieredModelCheckpoint(s3_every_n_train_steps=10, save_top_k=-1)
    runs.fit(callback, logger=CSVLogger(tmp_path / "logs"))
    (path,) = Path(tmp_path, "logs").rglob("metrics.csv")
    rows = [*csv.DictReader(path.read_text().splitlines())]
    assert [float(row["checkpoint/durable_step"]) for row in rows if row["checkpoint/durable_step"]] == [10, 20]
    assert all(float(row["checkpoint/capture_s"]) > 0 for row in rows if row["checkpoint/stall_s"])


DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "tiered-checkpoint.json"
LABELS = {each.name: {"namespace", "instance", each.label} for each in CATALOG}


def test_each_metric_that_they_name_exists_with_the_labels_that_they_ask_for():
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (?:>\n)?((?:.*\n)+?)        ?(?:for|labels):", (PROMETHEUS / "alerts.yml").read_text())
    assert len(asked) > 25
    for text in asked:
        names = re.findall(rf"({PREFIX}\w+)(?:\{{(.*?)\}})?", text)
        assert names, text
        for name, selectors in names:
            assert name in LABELS, text
            assert set(re.findall(r"(\w+)=", selectors)) <= LABELS[name], text
    in_tests = (PROMETHEUS / "alerts_test.yml").read_text()
    assert set(re.findall(rf"'({PREFIX}\w+)", in_tests)) <= set(LABELS)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


@needs_promtool
def test_the_formulas_of_the_page_give_a_value_of_each_job(tmp_path):
    page = (DEPLOY.parent / "docs" / "operations.md").read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    formulas = [each for each in re.findall(r"`([^`\n]+)`", page) if PREFIX in each and "(" in each]
    assert len(formulas) == 3
    of_labels = {"tier": ["memory", "durable"], "cause": ["stall", "restore", "repeated_steps"]}
    series = []
    for each in CATALOG:
        label = each.label
        for value in of_labels.get(label, [""]):
            more = f', {label}="{value}"' if label else ""
            name = f'{each.name}{{namespace="gpt-1", instance="a", job="node"{more}}}'
            series.append({"series": name, "values": "1+1x20"})
    tests = [
        {"expr": f"count({formula}) > 0", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for formula in formulas
    ]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    (tmp_path / "page.json").write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "page.json"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_accepts_the_rules(command):
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
