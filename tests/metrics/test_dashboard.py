"""A real Prometheus scrapes a real run, and each expression of the dashboard returns data."""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.launch import free_port
from support.training import Runs

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.metrics.collect import Source
from tiered_checkpoint_io.metrics.text import prometheus_text

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tiered-checkpoint.json"
WAIT_S = 60.0
#: What only a job that keeps replicas has.
OF_REPLICAS = "tiered_checkpoint_replicated_step"


@contextmanager
def served(source):
    """Serves metrics as node_exporter serves a textfile; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = prometheus_text(source()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


class Prometheus:
    """The server, over an exporter; it asks once a second."""

    def __init__(self, folder, exporter):
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.json'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def series(self, expression):
        """What a query gives now; nothing while the server starts."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            assert self._process.poll() is None
            return []
        return [each for each in found if each["value"][1] != "NaN"]

    def close(self):
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_every_panel_has_data_of_a_run_that_was_killed_and_goes_on(tmp_path, memory_dir):
    runs = Runs(str(tmp_path / "durable"), memory_dir, tmp_path)
    schedule = {"memory_every_n_train_steps": 5, "s3_every_n_train_steps": 10}
    runs.fit(TieredModelCheckpoint(**schedule), stop_at=17, max_steps=20)
    (root,) = Path(memory_dir).glob("tiered-*/*")
    with served(Source(lambda: [root])) as port, closing(Prometheus(tmp_path, port)) as prometheus:
        # A rate needs what was before, too.
        before = _until(lambda: prometheus.series("tiered_checkpoint_saves_total"))
        runs.fit(TieredModelCheckpoint(**schedule), max_steps=40)
        namespace = before[0]["metric"]["namespace"]
        asked = {each: each.replace("$namespace", namespace) for each in expressions()}
        assert len(asked) > 20
        empty = {each for each in asked if OF_REPLICAS not in each}
        deadline = time.monotonic() + WAIT_S
        while empty and time.monotonic() < deadline:
            time.sleep(0.5)
            empty = {each for each in empty if not prometheus.series(asked[each])}
        assert not empty
        # The list of jobs, by which a dashboard begins.
        (variable,) = re.findall(r"label_values\((\w+), namespace\)", DASHBOARD.read_text())
        assert {each["metric"]["namespace"] for each in prometheus.series(variable)} == {namespace}


def _until(look):
    deadline = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found
