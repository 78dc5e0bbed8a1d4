"""First hour of a stranger: commands over a real S3 server, and their output, compared with a text."""

import contextlib
import difflib
import os
import re
import signal
import time
from pathlib import Path

from support.launch import launch

from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.memory.node import is_locked
from tiered_checkpoint_io.memory.tier import MemoryTier

FOLDER = Path(__file__).parents[1] / "first_hour"
UPDATE = os.environ.get("TIERED_UPDATE_EXPECTED") == "1"
BUCKET = "bucket"
DEADLINE_S = 120.0

#: Lines of Lightning's and torch's own, and those that only a slow machine shows.
_FOREIGN = re.compile(
    r"^(GPU available|TPU available|HPU available|💡 Tip|`Trainer[.(]|`weights_only` was not|Loaded model weights|Restor(ing|ed) |LOCAL_RANK|You are using|Testing: "
    r"|Adding \d+ callbacks|Detected KeyboardInterrupt|.*/site-packages/.*:\d+: |.*training waited <time> |.*waiting for \d+ checkpoint|s3://\S+ has not answered for <time>; giving up|.*retrying: |[a-z ]+: <size> of <size>, <rate>)"
)
#: Texts that differ from run to run, and their placeholders.
_PLACEHOLDERS = [
    (r"\d\d\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(\+00:00|Z| UTC)?", "<date>"),
    (r"\[<date>\] \[([\w-]+)\] \[[\w.]+\] \[(\w+)\] \[[\w.]+:\d+\] \[Rank (\d+)\] ", r"\2 "),
    (r"\(?\d+(\.\d+)? [GMK]iB/s\)?", "<rate>"),
    (r"\d+(\.\d+)? ([GMK]i)?B\b", "<size>"),
    (r"\d+ bytes", "<size>"),
    (r"bytes \d+-\d+ of", "bytes <range> of"),
    (r"\b\d+(\.\d+)? (s|ms|min)\b", "<time>"),
    (r"\d+(\.\d+)? ?%", "<percent>"),
    (r"\b(process|pid) \d+", r"\1 <pid>"),
    (r"drain: has not run, 0", "drain: process <pid>, last seen <time> ago, 0"),
    (r"tiered-\d+/", "tiered-<uid>/"),
    (r"\b[0-9a-f]{16,}\b", "<id>"),
    # How long memory keeps what is durable depends on the speed of uploads.
    (r"\tmemory, durable\t", "\tdurable\t"),
    (r"http://127\.0\.0\.1:\d+", "<endpoint>"),
    (r"[━─]{2,}", "─"),
    (r" {2,}", " "),
]
#: A save id: time, counter and a random part.
_IDS = re.compile(r"\b\d{8,}[0-9a-zA-Z.]*(-[0-9a-zA-Z]+)+\b")


def normalized(text, places):
    """Returns a command's output with times, sizes, paths and process ids replaced, and without Lightning's own lines.

    Args:
        text: Output on stdout and stderr.
        places: Placeholders of this run's paths, hosts and ports, by the printed text.
    """
    for real, shown in sorted(places.items(), key=lambda place: -len(place[0])):
        text = text.replace(real, shown)
    for pattern, shown in _PLACEHOLDERS:
        text = re.sub(pattern, shown, text)
    text = _IDS.sub("<id>", text)
    lines, inside = [], ""
    for line in text.splitlines():
        if inside and line.startswith((" ", "\t")):
            # Of a warning, one line of the source.
            inside = inside if inside == "traceback" else ""
            continue
        inside = ""
        if line.startswith("Traceback (most recent call last)"):
            # The last line is the error; the others are places, which change with every release.
            inside = "traceback"
        elif _FOREIGN.match(line):
            inside = "warning"
        elif line.strip() and not line.startswith(("During handling of", "The above exception was")):
            lines.append(line.rstrip())
    return lines


def compare(name, sections):
    """Compares what the commands of a story printed with ``expected/<name>.txt``, or writes that text again.

    Args:
        name: The story's name.
        sections: Each command with its lines. Those of the log may come in another order, and more than once: the drain
            and the trainer run at the same time, and a slow machine has more lines about waits.
    """
    path = FOLDER / "expected" / f"{name}.txt"
    text = "\n".join("\n".join([f"$ {command}", *lines, ""]) for command, lines in sections)
    if UPDATE:
        path.write_text(text)
        return
    assert path.exists(), f"{path.name} is not recorded: run with TIERED_UPDATE_EXPECTED=1, and read it"
    expected = path.read_text()
    if _comparable(expected) != _comparable(text):
        difference = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "expected", "now", n=2))
        raise AssertionError(f"{path.name} differs (TIERED_UPDATE_EXPECTED=1 records it):\n{difference}")


def _comparable(text):
    return [
        ([line for line in lines if not _is_log(line)], sorted(set(filter(_is_log, lines))))
        for lines in (section.splitlines() for section in re.split(r"^(?=\$ )", text, flags=re.MULTILINE))
    ]


def _is_log(line):
    return line.startswith(("INFO ", "WARNING ", "ERROR "))


class Story:
    """One stranger: a folder, a bucket, a node's memory, and the commands that were run there."""

    def __init__(self, folder, memory_dir, endpoint_url):
        self.folder = Path(folder)
        self.memory_dir = memory_dir
        self.sections = []
        self._places = {str(folder): "<here>", memory_dir: "/dev/shm", str(FOLDER / "scripts"): "<scripts>"}
        self._places |= {endpoint_url: "<endpoint>", endpoint_url.partition("//")[2]: "<endpoint>"}

    def python(self, script, *arguments, prelude="", ranks=0, **hurry):
        """Runs a file of the folder, or a script of ``scripts/``, with other bounds; returns its output and status.

        With ``ranks``, so many of them, as torchrun does; the output is of all, the status of the first that failed.
        """
        path = FOLDER / "scripts" / script
        command = [str(path if path.exists() and not (self.folder / script).exists() else script), *arguments]
        return self._run(f"python {script}", command, prelude, hurry, ranks)

    def tiered_ckpt(self, *arguments):
        return self._run("tiered-ckpt", ["tiered-ckpt", *arguments])

    def shown(self, name):
        """Compares all that was printed so far with the text of that name."""
        compare(name, self.sections)

    def drained(self):
        """Waits until no drain of this story works any more."""
        for root in self.roots():
            end = time.monotonic() + DEADLINE_S
            while Queue(root).look(MemoryTier(root)) or _has_drain(root):
                assert time.monotonic() < end, f"the drain of {root} does not end"
                time.sleep(0.1)

    def loses_memory(self):
        """Replaces the node: its memory is empty."""
        self.drained()
        for root in self.roots():
            for path in sorted(root.rglob("saves/*/**/*"), reverse=True):
                path.unlink() if not path.is_dir() else path.rmdir()
            for path in root.glob("saves/*"):
                path.rmdir()

    def roots(self):
        return [path for path in Path(self.memory_dir).glob("tiered-*/*") if (path / "status").is_dir()]

    def close(self):
        """Ends drains that still try to reach a durable tier that is not there."""
        for root in self.roots():
            end = time.monotonic() + DEADLINE_S
            while _has_drain(root):
                assert time.monotonic() < end, f"the drain of {root} does not end"
                if (pid := Queue(root).progress().pid) > 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                time.sleep(0.1)

    def _run(self, shown, command, prelude="", hurry=(), ranks=0):
        job = {"folder": str(self.folder), "memory_dir": self.memory_dir, "command": command, "prelude": prelude}
        job |= {"hurry": dict(hurry), "is_rank": ranks > 0}
        jobs = [job] * max(1, ranks)
        statuses = launch(self.folder, jobs, deadline_s=DEADLINE_S, worker=FOLDER / "runner.py")
        status = next((each for each in statuses if each != 0), 0)
        output = "".join((self.folder / f"log-{rank}.txt").read_text() for rank in range(len(jobs)))
        lines = normalized(output, self._places)
        lines.append("[killed]" if status is None else f"[exit {status}]")
        self.sections.append((" ".join([shown, *command[1:]]), lines))
        return output, status


def _has_drain(root):
    return (root / LOCK_FILE).exists() and is_locked(root / LOCK_FILE)


def blocks_of(document):
    """Returns the fenced blocks of a Markdown text: heading, language and text of each, word for word."""
    found, heading, language, inside = [], "", None, []
    for line in document.splitlines():
        if language is None and line.startswith("#"):
            heading = line.lstrip("# ").strip()
        if line.startswith("```"):
            if language is None:
                language, inside = line[3:].strip(), []
            else:
                found.append((heading, language, "\n".join(inside) + "\n"))
                language = None
        elif language is not None:
            inside.append(line)
    return found
