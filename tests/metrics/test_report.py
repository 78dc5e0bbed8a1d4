"""The report of a run: one page that needs nothing else, whatever names and errors hold."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain.events import EVENTS_FILE, note
from tiered_checkpoint_io.metrics.report import page

CHROMIUM = shutil.which("chromium")
#: It must not look for anything by itself.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>&amp;\u2028"
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def command(*arguments):
    return CliRunner().invoke(app, arguments)


def data_of(text):
    (found,) = DATA.findall(text)
    return json.loads(found)


def test_a_run_that_died_as_a_page(dead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("report", dead.dirpath, "--memory-dir", dead.memory_dir)
    assert (done.exit_code, done.stdout[:18]) == (0, "wrote report.html:")
    text = (tmp_path / "report.html").read_text()
    data = data_of(text)
    happened = [(each["what"], each["step"]) for each in data["events"] if not each.get("small")]
    # The drain works beside the training, so its line may come before the end.
    expected = [("training started", 0), ("saved, to be uploaded", 10), ("training ended", 17), ("uploaded", 10)]
    assert sorted(happened) == sorted(expected)
    assert [each["name"] for each in data["durable"]] == ["epoch=0-step=10.ckpt"]
    assert ["Last step", "17", False] in data["cards"]
    # Nothing is asked of elsewhere: the only addresses are names of the drawing's format and of the durable tier.
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}

    # Of a node that has no record of it, and for programs.
    elsewhere = command("report", dead.dirpath, "--memory-dir", str(tmp_path), "--json")
    assert json.loads(elsewhere.stdout)["checkpoints"] == 1
    assert "without events" in elsewhere.stderr
    assert data_of((tmp_path / "report.html").read_text())["events"] == []

    # Without dirpath no server is asked, so nothing is said of it.
    ours = ("report", "--memory-dir", dead.memory_dir)
    assert re.fullmatch(r"wrote report.html: \d+ events\n", command(*ours).stdout)
    assert json.loads(command(*ours, "--json").stdout)["checkpoints"] is None


def test_names_and_errors_are_text():
    events = [
        {"t": 1.0, "event": "start", "step": 0},
        {"t": 2.0, "event": "failed", "name": EVIL, "step": 1, "error": EVIL},
        {"t": 3.0, "event": "upload", "action": EVIL, "name": EVIL, "state": EVIL, "step": "1", "seconds": "NaN"},
        {"t": 4.0, "event": "save", "step": float("nan"), "stall_s": None, "name": None},
    ]
    text = page(EVIL, events, [], dirpath=EVIL, now=5.0)
    assert text.count("<script") == 2
    assert data_of(text)["events"][1]["name"] == EVIL


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing is known of this run"),
        (("--output", "/nowhere/report.html"), "/nowhere/report.html can't be written"),
        (("--namespace", "other"), "no memory tier at"),
    ],
)
def test_wrong_use_is_one_error(dead, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not arguments:
        next(_records(dead)).unlink()
    failed = command("report", "--memory-dir", dead.memory_dir, *arguments)
    assert said in str(failed.exception)
    assert not (tmp_path / "report.html").exists()


def _records(runs):
    return Path(runs.memory_dir).glob(f"tiered-*/*/{EVENTS_FILE}")


@pytest.mark.matrix
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)")
def test_a_browser_shows_it_and_clicks(dead, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra browser)")
    (record,) = _records(dead)
    note(record.parent, "failed", name=EVIL, step=18, error=EVIL)
    output = tmp_path / "report.html"
    assert command("report", dead.dirpath, "--memory-dir", dead.memory_dir, "-o", str(output)).exit_code == 0
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        try:
            for width, scheme in ((1280, "light"), (390, "dark")):
                tab = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
                asked, errors = [], []
                tab.on("request", lambda request, asked=asked: asked.append(request.url))
                tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
                tab.on("console", lambda line, errors=errors: errors.append(line.text))
                tab.goto(output.as_uri())
                failures = tab.locator("button[data-kind=failure]")
                assert failures.inner_text() == "Failures (1)"
                row = tab.locator("#rows tr", has_text="save failed")
                assert EVIL[:20] in row.inner_text()
                row.click()
                assert "save failed" in tab.locator("#detail").inner_text()
                failures.click()
                assert failures.get_attribute("aria-pressed") == "false"
                assert row.count() == 0
                # The lane of saves, below the steps and stalls: the nearest one is told.
                tab.locator("#chart").click(position={"x": width / 2, "y": 265})
                assert "saved" in tab.locator("#detail").inner_text()
                for zoom in ("in", "in", "back", "on", "out", "all"):
                    tab.locator(f"[data-zoom={zoom}]").click()
                tab.locator("#chart").focus()
                tab.keyboard.press("ArrowRight")
                assert tab.evaluate("window.hacked") is None
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                shot = tab.screenshot(path=str(tmp_path / f"{width}.png"))
                assert len(shot) > 10_000
                assert (asked, errors) == ([output.as_uri()], [])
                tab.close()
        finally:
            browser.close()
