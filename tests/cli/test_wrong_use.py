"""Wrong use of each command that asks a server: one line, the documented status, nothing half done."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.committing import save
from support.draining import Node, names, objects
from support.fault_proxy import FaultProxy, refuse, where
from support.iam import Judge, policy

from tiered_checkpoint_io import cli
from tiered_checkpoint_io.cli import output
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.ids import LEASE_KEY
from tiered_checkpoint_io.stores import open_store

RIGHTS = {
    *("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket", "s3:ListBucketMultipartUploads"),
    *("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
}


@dataclass(frozen=True)
class Use:
    """One use of a command.

    Attributes:
        arguments: Its arguments.
        unknown: The same, with a name that does not exist.
        makes: The checkpoints that are durable after it.
        removes: The checkpoints that are no longer durable.
        files: Files that it writes outside of the tiers.
    """

    arguments: str
    unknown: str = ""
    makes: tuple = ()
    removes: tuple = ()
    files: tuple = ()


#: Over a run with the checkpoints c1 to c4, on a node with m.ckpt in memory and d.ckpt queued.
USES = {
    "ls": Use("{url} --memory-dir {memory}"),
    "ls of one": Use("{url} c3 --memory-dir {memory}", "{url} no --memory-dir {memory}"),
    "verify": Use("{url} --tier durable", "{url} no --tier durable"),
    "get a file": Use("{url} c3 {tmp}/model.pt", "{url} no {tmp}/model.pt", files=("model.pt",)),
    "flush": Use("m.ckpt --memory-dir {memory}", "no --memory-dir {memory}", makes=("d.ckpt", "m.ckpt")),
    "get": Use("{url} c3 {tmp}/got", "{url} no {tmp}/got", files=("got/c3",)),
    "get to memory": Use("{url} c3 --memory-dir {memory} --namespace other", "{url} no --memory-dir {memory}"),
    "prune": Use("{url} --keep-latest 1 --yes", removes=("c1", "c2", "c3")),
    "watch": Use("{url} --idle-timeout 0 --exec true --after="),
}


def cases(names, quick=("get",)):
    further = pytest.mark.matrix
    return [pytest.param(name, marks=() if name in quick else further) for name in names]


@pytest.fixture
def scene(s3_server, s3_bucket, memory_dir, tmp_path, monkeypatch, capfd):
    with FaultProxy(s3_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        yield Scene(proxy, s3_bucket, memory_dir, tmp_path, monkeypatch, capfd)


class Scene:
    """Runs below one bucket, one after the other, each with a node and a folder of its own."""

    def __init__(self, proxy, bucket, memory_dir, tmp_path, monkeypatch, capfd):
        self.proxy, self.bucket, self.memory_dir = proxy, bucket, memory_dir
        self.tmp_path, self.monkeypatch, self.capfd = tmp_path, monkeypatch, capfd
        # On a busy machine, a command waits longer than 5 s for the drain.
        monkeypatch.setattr(output, "EVERY_S", 60.0)
        self.count = 0

    def begin(self, command):
        """Makes a new run, for the use of a command."""
        self.count += 1
        self.proxy.plan = as_it_is
        self.command, self.use = command.split()[0], USES[command]
        self.tmp, self.memory = self.tmp_path / str(self.count), f"{self.memory_dir}/{self.count}"
        self.tmp.mkdir()
        os.mkdir(self.memory)
        self.url = f"s3://{self.bucket}/{self.count}"
        self.node = Node(self.memory, self.url)
        self.node.save("m.ckpt", b"M" * 100, durable=False)
        self.node.save("d.ckpt", b"D" * 100)
        self.store = open_store(self.node.config)
        for number in (1, 2, 3, 4):
            save(self.store, f"c{number}", number)
        self.before = self.held()

    def line(self, arguments=None):
        given = {"url": self.url, "memory": self.memory, "tmp": self.tmp}
        return [self.command, *(each.format(**given) for each in (arguments or self.use.arguments).split())]

    def run(self, *line):
        """Runs a command in this process, as its entry point does; returns status, output and errors."""
        self.capfd.readouterr()
        before = signal.getsignal(signal.SIGINT)
        self.monkeypatch.setattr(sys, "argv", ["tiered-ckpt", *line])
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code
        finally:
            signal.signal(signal.SIGINT, before)
        return status, *self.capfd.readouterr()

    def held(self):
        """Returns the durable checkpoints, the parts in node memory, and files."""
        tiers = [MemoryTier(folder.parent) for folder in Path(self.memory).glob("tiered-*/*/saves")]
        parts = sorted(f"{tier.root.name}/{each.part.name}" for tier in tiers for each in tier.parts())
        files = {str(each.relative_to(self.tmp)) for each in self.tmp.rglob("*") if each.is_file()}
        return {"durable": set(names(self.store)), "memory": parts, "files": files}

    def nothing_is_half_done(self, *, done):
        """Checks that all readers see intact content, and either all or none of the command's effects.

        A prune, and an upload of several, is done for each checkpoint by itself.
        """
        self.proxy.plan = as_it_is
        # A lease of an ended process does not count; this process continues.
        self.store.delete(LEASE_KEY)
        status, out, err = self.run("verify", self.url, "--tier", "durable")
        assert (status, "DAMAGED" in out) == (0, False), out + err
        there, use = self.held(), self.use
        least, most = self.before["durable"] - {*use.removes}, self.before["durable"] | {*use.makes}
        if done:
            assert there["durable"] == most - {*use.removes}
        else:
            assert least <= there["durable"] <= most
        assert there["files"] == (set(use.files) if done else set())
        assert set(self.before["memory"]) <= set(there["memory"]), "node memory loses nothing"
        assert done or there["memory"] == self.before["memory"]
        # Files of no checkpoint would be left of what was half done.
        assert objects(self.store) == sorted(there["durable"])


def as_it_is(operation, number):
    return None


def is_one_line(said, *words):
    status, out, err = said
    assert "\x1b" not in out + err, "this is no terminal"
    assert (status, err.count("\n"), err.startswith("error: ")) == (1, 1, True), said
    assert [word for word in words if word not in err] == [], err


@pytest.mark.parametrize("command", cases(USES))
def test_each_right_that_is_missing(command, scene):
    """One line that names it, and once it is there the same command does its work."""
    scene.begin(command)
    judge = Judge(policy(RIGHTS))
    scene.proxy.plan = judge.plan
    status, _, err = scene.run(*scene.line())
    assert (status, err) == (0, "")
    scene.nothing_is_half_done(done=True)
    scene.begin(command)
    for missing in sorted(judge.used):
        scene.proxy.plan = Judge(policy(RIGHTS - {missing})).plan
        said = scene.run(*scene.line())
        if said[0] == 0:
            # The command does without the right: it warns of all undone work.
            assert all(line.startswith("warning: ") for line in said[2].splitlines()), said
            scene.nothing_is_half_done(done=True)
            scene.begin(command)
        else:
            is_one_line(said, missing)
            scene.nothing_is_half_done(done=False)
    assert scene.run(*scene.line())[0] == 0
    scene.nothing_is_half_done(done=True)


@pytest.mark.parametrize("command", cases(USES, quick=("get a file",)))
def test_what_is_not_there_and_a_pipe_that_is_closed(command, scene):
    """Behind ``| head -1``, no further line is printed, and the command's work is done."""
    scene.begin(command)
    if scene.use.unknown:
        is_one_line(scene.run(*scene.line(scene.use.unknown)), "no")
    scene.proxy.plan = where(refuse(404, "NoSuchBucket"))
    is_one_line(
        scene.run(*scene.line()), f"bucket '{scene.bucket}' does not exist there; check dirpath and endpoint_url"
    )
    scene.nothing_is_half_done(done=False)
    reader, writer = os.pipe()
    os.close(reader)
    with scene.monkeypatch.context() as patched, open(writer, "w", buffering=1) as closed:
        patched.setattr(sys, "stdout", closed)
        status, _, err = scene.run(*scene.line())
    assert (status, err) == (141, "")
    scene.nothing_is_half_done(done=True)
