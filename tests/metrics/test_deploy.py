"""The dashboard and the alert rules: they ask for metrics that exist, and the rules fire when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tiered_checkpoint_io.metrics import CATALOG, PREFIX

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
