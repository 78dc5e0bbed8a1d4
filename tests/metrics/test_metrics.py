"""One catalogue, one collector: each exporter tells the same of a training, and of a node whose trainer is dead."""

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from support.draining import where_of
from support.supporting import build
from support.training import Model
from typer.testing import CliRunner

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.metrics import exports, recording
from tiered_checkpoint_io.metrics.catalog import CATALOG, PREFIX, table
from tiered_checkpoint_io.metrics.collect import Collector, Source
from tiered_checkpoint_io.metrics.otel import Instruments

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(rf"^\| `{PREFIX}\w+` .*\n", re.MULTILINE)


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


def test_the_document_has_the_catalogue():
    text = DOCUMENT.read_text()
    rows = "".join(f"{line}\n" for line in [*table()][2:])
    if os.environ.get("TIERED_UPDATE_EXPECTED") == "1":
        head = "\n".join([*table()][:2]) + "\n"
        DOCUMENT.write_text(ROW.sub("", text).replace(head, head + rows))
        return
    assert "".join(ROW.findall(text)) == rows, "write it anew by TIERED_UPDATE_EXPECTED=1"
    for each in CATALOG:
        assert re.fullmatch(rf"{PREFIX}[a-z_]+", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter")
        if each.unit not in ("", "steps"):
            assert each.unit in each.name


def test_a_dead_trainer_and_one_that_resumes(dead, tmp_path):
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

    told = tmp_path / "m.prom"
    io = dead.io(metrics_export=f"prometheus=0, textfile={told}, cloudwatch={tmp_path / 'm.log'}")
    seen = {}

    class Asked(Model):
        def on_train_batch_end(self, *_):
            (server,) = (
                each for each in self.trainer.callbacks[-1]._recording._exports._running if hasattr(each, "port")
            )
            if told.exists():
                seen.setdefault("told", parsed(told.read_text())["running"])
            if "step" not in seen:
                url = f"http://127.0.0.1:{server.port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    seen.update(parsed(answer.read().decode()))

    guard = "StrategyGuard"
    checkpoints = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10)
    trainer = dead.trainer([checkpoints], io=io, max_steps=20)
    trainer.callbacks.sort(key=lambda each: type(each).__name__ == guard)
    trainer.fit(Asked(), ckpt_path="tiered:latest")
    # A figure may be a moment old: on a busy machine it is of the batch that has just ended.
    assert seen["step"] in (15, 16)
    assert (seen["running"], seen["restores_total"], seen["repeated_steps_total"], seen["told"]) == (1, 1, 2, 1)
    assert seen["lost_seconds_total repeated_steps"] > 0
    # Ended: nothing is left running. A textfile would have its last values for ever.
    assert not told.exists()
    ended = steady(values(root))
    assert (ended["running"], ended["step"], ended["durable_step"], ended["steps_at_risk"]) == (0, 20, 20, 0)
    lines = [json.loads(line) for line in (tmp_path / "m.log").read_text().splitlines()]
    assert max(line.get(f"{PREFIX}durable_step", -1) for line in lines) == 20
    for line in lines:
        (about,) = line["_aws"]["CloudWatchMetrics"]
        assert {each["Name"] for each in about["Metrics"]} | {*about["Dimensions"][0], "_aws"} == set(line)


def test_a_long_validation_is_no_silence(runs, monkeypatch):
    monkeypatch.setattr(recording, "_STEP_EVERY_S", 0)

    class Validated(Model):
        validation_step = Model.test_step
        val_dataloader = Model.train_dataloader

    trainer = runs.trainer([TieredModelCheckpoint()], max_steps=1, limit_val_batches=3, val_check_interval=1)
    trainer.fit(Validated())
    assert [each["step"] for each in read_events(root_of(runs)) if each["event"] == "step"] == [1] * 4


def test_opentelemetry_has_the_same(dead):
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    root, reader = root_of(dead), InMemoryMetricReader()
    provider = MeterProvider([reader])
    instruments = Instruments(Source(lambda: [root]), provider)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {
        _key(each.name, point.attributes): point.value for each in scope.metrics for point in each.data.data_points
    }
    assert steady(points) == steady(values(root))
    instruments.close()
    assert reader.get_metrics_data() is None
    # A second training of the same process.
    again = Instruments(Source(lambda: [root]), provider)
    assert reader.get_metrics_data() is not None
    again.close()
    provider.shutdown()


@pytest.mark.matrix
def test_by_otlp_where_the_program_has_no_provider(dead, monkeypatch):
    """To a real server on this machine, as a collector is one."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    bodies = []

    class Collecting(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collecting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Instruments(Source(lambda: [root_of(dead)])).close()
        server.shutdown()
        thread.join()
    request = ExportMetricsServiceRequest.FromString(bodies[-1])
    (scope,) = request.resource_metrics[0].scope_metrics
    assert {each.name for each in scope.metrics} >= {f"{PREFIX}step", f"{PREFIX}uploads_total"}


def test_the_command_shows_and_writes(dead, tmp_path):
    where = ("metrics", "--memory-dir", dead.memory_dir)
    assert f"{PREFIX}durable_step\tnamespace=" in command(*where).stdout
    document = json.loads(command(*where, "--json").stdout)
    assert {each["name"]: each["value"] for each in document["metrics"]}[f"{PREFIX}step"] == 17
    assert command(*where, "--export", f"textfile={tmp_path / 'x.prom'}", "--once").exit_code == 0
    assert parsed((tmp_path / "x.prom").read_text())["step"] == 17
    printed = command(*where, "--export", "cloudwatch=-", "--once").stdout.splitlines()
    assert json.loads(printed[0])[f"{PREFIX}step"] == 17


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--export", "prometheus=web"), "prometheus=[HOST:]PORT"),
        (("--export", "statsd=1"), "metrics can't go to 'statsd=1'"),
        (("--once",), "--once needs --export"),
        (("--export", "otel", "--json"), "give one"),
    ],
)
def test_wrong_use(arguments, said, memory_dir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    done = command("metrics", "--memory-dir", memory_dir, *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_the_environment_counts_in_place_of_the_configuration(monkeypatch):
    monkeypatch.delenv(exports.ENVIRONMENT, raising=False)
    assert exports.targets_of_trainer(None) == []
    assert [each.path for each in exports.targets_of_trainer("cloudwatch=-")] == ["-"]
    monkeypatch.setenv(exports.ENVIRONMENT, "cloudwatch=/x.log")
    assert [each.path for each in exports.targets_of_trainer("cloudwatch=-")] == ["/x.log"]
    monkeypatch.setenv(exports.ENVIRONMENT, "")
    assert exports.targets_of_trainer("cloudwatch=-") == []


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "tiered_checkpoint_io.metrics.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ConfigError, match=r"prometheus_client is not installed — pip install 'tiered-checkpoint-io\[metrics\]'"
    ):
        exports.parse_targets("prometheus=9464")


def test_opentelemetry_needs_its_exporter_whatever_provider_a_rank_has(monkeypatch):
    """Before training, on all ranks: only one of them exports, and it would fail alone."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(ConfigError, match=r"metric_exporter is not installed — pip install .*\[otel\]"):
        exports.parse_targets("otel")
    done = command("metrics", "--export", "otel")
    assert (done.exit_code, "is not installed" in done.output) == (2, True)
    monkeypatch.setattr(metrics, "get_meter_provider", MeterProvider)
    with pytest.raises(ConfigError, match="metric_exporter is not installed"):
        exports.parse_targets("otel")


def test_a_training_goes_on_with_the_exports_that_start(runs, tmp_path, monkeypatch, caplog):
    """A port that an earlier process still has, and a setting that OpenTelemetry's exporter refuses."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "0")
    told = tmp_path / "m.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        io = runs.io(metrics_export=f"prometheus={port}, otel, cloudwatch={told}")
        runs.trainer([TieredModelCheckpoint(memory_every_n_train_steps=1)], io=io, max_steps=2).fit(Model())
    assert f"{PREFIX}step" in told.read_text()
    assert f"metrics can't be served on 127.0.0.1:{port}: Address already in use" in caplog.text
    assert "metrics can't go to otel: ValueError: " in caplog.text
    # Training has ended before the port is given up.
    assert caplog.text.count("; training continues without") == caplog.text.count("; nothing was exported") == 1
    failed = command("metrics", "--export", "otel")
    assert "metrics can't go to otel: ValueError: " in str(failed.exception)


@pytest.mark.matrix
def test_the_command_serves_until_it_is_ended(dead):
    """A process beside a dead trainer; the port that it has is an error to the next one."""
    ours = [sys.executable, "-m", "tiered_checkpoint_io"]
    where = [*where_of(root_of(dead)), "--export"]
    with _running([*ours, "metrics", *where, "prometheus=0"]) as served:
        address = next(line for line in served.stderr if "http://" in line).split()[-1]
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert parsed(answer.read().decode())["step"] == 17
        port = address.split(":")[-1].partition("/")[0]
        second = subprocess.run(
            [*ours, "drain", "--stay", *where, f"prometheus={port}"], capture_output=True, text=True, timeout=60
        )
        assert second.returncode == 1
        assert re.fullmatch(rf"error: metrics can't be served on 127.0.0.1:{port}: Address .*\n", second.stderr)
        served.send_signal(signal.SIGTERM)
        assert served.wait(10) == 0


@contextlib.contextmanager
def _running(arguments):
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


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
