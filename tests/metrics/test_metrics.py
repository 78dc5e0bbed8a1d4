"""``status --prometheus``: metrics of a training, and of a dead one; dashboard, alert rules, and record of events."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from support.documented import command
from support.supporting import build
from support.training import Model, Runs

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.log import EVENTS_FILE, note, read_events
from tiered_checkpoint_io.metrics import CATALOG, PREFIX, prometheus_text
from tiered_checkpoint_io.model.events import totals_of


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
    expected |= {"saves_total memory": 2, "saves_total durable": 1, "pending": 0, "quarantined": 0}
    assert found.items() >= expected.items()
    assert 0 < found["capture_seconds_total"] < found["stall_seconds_total"] < found["run_seconds"]
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


def test_status_prints_prometheus_text(dead):
    where = ("status", "--memory-dir", dead.memory_dir, "--prometheus")
    assert len(command(*where).stdout.splitlines()) == len(prometheus_text([root_of(dead.memory_dir)]).splitlines())
    assert command(*where, "--json").exit_code == 2


def test_the_text_is_what_prometheus_reads(dead):
    """The series of one metric are together, of all namespaces."""
    parser = pytest.importorskip("prometheus_client.parser")
    root = root_of(dead.memory_dir)
    shutil.copytree(root, root.with_name("other"))
    families = list(parser.text_string_to_metric_families(prometheus_text([root, root.with_name("other")])))
    assert len(families) == len({each.name for each in families}) > 20
    names = [{each.labels["namespace"] for each in family.samples} for family in families]
    assert all(each == {root.name, "other"} for each in names)


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


def at(t, event, **facts):
    return {"t": float(t), "event": event, **facts}


def save(t, step, *, durable=False, queued=False, stall=0.5):
    facts = {"name": f"step={step}.ckpt", "size_bytes": 100, "stall_s": stall, "capture_s": stall / 2}
    return at(t, "save", step=step, durable=durable, queued=queued, **facts)


def uploaded(t, step, created, state="committed", action="save"):
    facts = {"action": action, "size_bytes": 100, "seconds": 2.0, "error": ""}
    return at(t, "upload", name=f"step={step}.ckpt", step=step, state=state, created=float(created), **facts)


KILLED = [
    at(1000, "start", step=0),
    save(1010, 10),
    save(1020, 20, durable=True, queued=True),
    uploaded(1023, 20, 1020, state="failed"),
    uploaded(1025, 20, 1020),
    save(1030, 30),
    at(1045, "step", step=45),
]


def test_what_a_run_that_was_killed_and_went_back_has_lost():
    dead = totals_of(KILLED)
    assert (dead.running, dead.step, dead.durable_step, dead.durable_at) == (True, 45, 20, 1020)
    assert (dead.memory_saves, dead.durable_saves, dead.stall_s, dead.capture_s) == (2, 1, 1.5, 0.75)
    assert dead.failed == 1
    # An evaluation loads a checkpoint: no step is repeated by that.
    loaded = at(1100, "restore", name="step=30.ckpt", step=30, tier="memory", seconds=3.0, created=1030.0)
    assert totals_of([*KILLED, loaded]).repeated_steps == 0
    back = totals_of([*KILLED, loaded, at(1101, "start", step=30), at(1116, "step", step=45)])
    assert (back.restores, back.restore_s) == (1, 3.0)
    assert (back.repeated_steps, back.repeated_s) == (15, 15.0)
    ended = totals_of([*KILLED, loaded, at(1101, "start", step=30), at(1131, "end", step=60, error="")])
    assert (ended.running, ended.step, ended.repeated_steps) == (False, 60, 15)
    assert totals_of([*KILLED, at(1046, "end", step=46, error="OSError")]).running


def restored(t, step, created, tier="durable"):
    return at(t, "restore", name=f"step={step}.ckpt", step=step, tier=tier, seconds=3.0, created=float(created))


def test_the_age_of_what_is_durable_is_training_time():
    # 25 s since the checkpoint of 1020 was captured. Neither uploads nor loads are training.
    dead = totals_of([*KILLED, uploaded(1900, 12, 900), restored(1950, 20, 1020)])
    assert (dead.durable_age_s, dead.active_at) == (25, 1045)
    # Training resumes a day later, from memory: the pause does not count.
    resumed = [*KILLED, restored(90_000, 30, 1030, "memory"), at(90_001, "start", step=30), at(90_016, "step", step=45)]
    assert (totals_of(resumed).durable_age_s, totals_of(resumed).active_at) == (40, 90_016)
    # An evaluation during the training loads one.
    assert totals_of([*resumed, restored(90_020, 20, 1020), at(90_031, "step", step=60)]).durable_age_s == 55
    # A save after the end, and one a day later, are no training in between.
    ended = [*resumed, at(90_020, "end", step=50, error=""), save(90_021, 50), save(180_000, 50)]
    assert totals_of(ended).durable_age_s == 44
    # A custom loop notes only saves and loads.
    loop = [save(1000, 10), save(1030, 20), restored(90_000, 20, 1030, "memory"), save(90_010, 30), save(90_050, 40)]
    assert totals_of(loop).durable_age_s == 70


def test_after_a_rollback_the_resumed_checkpoint_is_the_durable_one():
    far = [at(1000, "start", step=0), save(1300, 300, durable=True, queued=True), uploaded(1305, 300, 1300)]
    far += [save(1500, 500, durable=True, queued=True), uploaded(1505, 500, 1500), at(1510, "step", step=510)]
    back = totals_of([*far, restored(1600, 300, 1300), at(1601, "start", step=300), at(1616, "step", step=315)])
    assert (back.durable_step, back.durable_at, back.durable_age_s) == (300, 1300, 15)
    # If an evaluation loads it, training has not gone back; nor if another training begins.
    for others in ([at(1615, "step", step=520)], [at(1615, "start", step=0)], [at(1615, "start", step=510)]):
        assert totals_of([*far, restored(1600, 300, 1300), *others]).durable_step == 500
    assert totals_of([*far, restored(1600, 300, 1300), save(1610, 310)]).durable_step == 300, "a loop of one's own"
    # A save in the background is noted after later steps.
    late = [restored(900, 100, 800), at(901, "start", step=100), *far[1:], save(1512, 505)]
    assert totals_of(late).durable_step == 500


def test_only_failures_of_saves_and_uploads_are_counted():
    tried = [uploaded(1, 1, 0, "failed", action) for action in ("save", "part", "alias", "delete", "retain")]
    called = [at(2, "failed", step=1, action=action) for action in ("save", "save", "removal")]
    assert totals_of([*tried, *called]).failed == 4


def test_the_record_is_bounded_and_its_totals_stay(tmp_path):
    facts = {key: value for key, value in save(0, 1).items() if key not in ("t", "event", "name")}
    for _ in range(7000):
        note(tmp_path, "save", name="x" * 290, **facts)
    assert (tmp_path / EVENTS_FILE).stat().st_size < 2 << 20
    assert len(read_events(tmp_path)) < 6000
    assert totals_of(read_events(tmp_path)).memory_saves == 7000
    assert os.stat(tmp_path / EVENTS_FILE).st_mode & 0o777 == 0o600
