"""Log lines: rank, place, step, time and size; into a file, and to a user's own logger."""

import logging
import re
import subprocess
import sys

import pytest
from support.bad_input import state

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import get_logger

LINE = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\] \[(?P<namespace>[\w-]+)\] \[(?P<logger>[\w.]+)\]"
    r" \[(?P<level>[A-Z]+)\] \[(?P<file>\w+\.py):(?P<line>\d+)\] \[Rank (?P<rank>\d+)\]"
    r" (?:Step (?P<step>\d+): )?(?P<text>.+)"
)


@pytest.fixture
def job(start, tmp_path):
    given = {"dirpath": tmp_path / "d", "namespace": "gpt-1", "log_dir": tmp_path / "logs"}
    return lambda **options: start(**{**given, **options})


def lines(path):
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found), path.read_text()
    return [match.groupdict() for match in found]


def test_a_users_own_logger_gets_it_all_with_their_own_format(job, tmp_path, capfd):
    said = []

    class Theirs(logging.Handler):
        def emit(self, record):
            said.append((record.name, record.namespace, record.rank, record.getMessage()))

    theirs = logging.getLogger("theirs")
    theirs.propagate = False
    theirs.setLevel(logging.INFO)
    theirs.addHandler(Theirs())
    adapter = logging.LoggerAdapter(theirs, {})
    for logger in (theirs, adapter):
        said.clear()
        io = job(logger=logger, log_dir=None)
        io.save_checkpoint(state(4), "a.ckpt")
        io.teardown()
        assert {each[:3] for each in said} == {("theirs", "gpt-1", 0)}
        assert [each[3] for each in said if "a.ckpt" in each[3] and "relative" not in each[3]] == [
            next(each[3] for each in said if each[3].startswith("Step 4: saved a.ckpt to memory and "))
        ]
    assert "saved a.ckpt" not in capfd.readouterr().err


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_a_log_dir_that_can_not_be_written_is_an_error_that_names_it(taken, tmp_path):
    folder = tmp_path / "logs"
    if taken == "folder":
        folder.write_text("a file in its place")
    else:
        (folder / "ns_checkpointing.log").mkdir(parents=True)
    with pytest.raises(ConfigError, match="log_dir is '.*/logs': no log can be written there: .* — name a folder"):
        get_logger("ns", log_dir=str(folder))


SCRIPT = """
import logging, logging.config
{before}
from tiered_checkpoint_io.logs import get_logger
log = get_logger("gpt-1", rank={rank}, log_dir={log_dir!r})
{after}
log.debug("a detail")
log.info("news")
log.warning("a warning")
"""
HYDRA = """
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": %s,
    "formatters": {"simple": {"format": "HYDRA %%(levelname)s %%(message)s"}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "simple", "stream": "ext://sys.stdout"},
        "file": {"class": "logging.FileHandler", "formatter": "simple", "filename": "job.log"},
    },
    "root": {"level": "INFO", "handlers": ["console", "file"]},
})
"""
BASIC = "logging.basicConfig(level=logging.%s, format='BASIC %%(levelname)s %%(message)s')"
OURS = "logging.getLogger('tiered_checkpoint_io').setLevel(logging.%s)"
BOTH = ["INFO news", "WARNING a warning"]


@pytest.mark.parametrize(
    ("setting", "rank", "console", "files"),
    [
        pytest.param("", 0, BOTH, {}, id="nothing configured"),
        pytest.param("", 1, BOTH[1:], {}, id="another rank"),
        pytest.param(OURS % "DEBUG", 1, ["DEBUG a detail", "DEBUG news", BOTH[1]], {}, id="another rank at DEBUG"),
        pytest.param(BASIC % "INFO", 0, ["BASIC INFO news", "BASIC WARNING a warning"], {}, id="basicConfig"),
        pytest.param(
            f"{BASIC % 'WARNING'}; {OURS % 'INFO'}", 0, ["BASIC INFO news", "BASIC WARNING a warning"], {}, id="ours"
        ),
        pytest.param(
            "logging.basicConfig(level=logging.INFO, filename='job.log', format='%(message)s')",
            0,
            BOTH,
            {"job.log": ["news", "a warning"]},
            id="a root file",
        ),
        *[
            pytest.param(
                HYDRA % disables,
                0,
                ["HYDRA INFO news", "HYDRA WARNING a warning"],
                {"job.log": ["HYDRA INFO news", "HYDRA WARNING a warning"]},
                id=f"Hydra, disables {disables}",
            )
            for disables in (False, True)
        ],
    ],
)
@pytest.mark.parametrize("when", ["after", "before"])
def test_the_users_logging_is_kept_and_nothing_is_said_twice(tmp_path, setting, rank, console, files, when):
    """Set before our logger is made, or after it; with a log_dir of its own, or without."""
    logs = tmp_path / "logs" if when == "after" else None
    settings = {"before": "", "after": "", when: setting}
    (tmp_path / "job.py").write_text(SCRIPT.format(rank=rank, log_dir=logs and str(logs), **settings))
    job = [sys.executable, "job.py"]
    done = subprocess.run(job, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    said = (done.stdout + done.stderr).splitlines()
    # Our format shortened.
    said = [f"{match['level']} {match['text']}" if (match := LINE.fullmatch(line)) else line for line in said]
    assert said == console
    assert {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.log")} == files
    if logs:
        # The file depends only on the level of our logger, not on the user's other settings.
        asked = ["INFO", "WARNING"] if rank == 0 else ["WARNING"]
        asked = ["DEBUG", "DEBUG", "WARNING"] if setting == OURS % "DEBUG" else asked
        assert [each["level"] for each in lines(logs / "gpt-1_checkpointing.log")] == asked
