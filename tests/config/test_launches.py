"""Launches: live processes of one launch, and two jobs that one node must keep apart; by real processes."""

import contextlib
import json
import os

import pytest
from support.running import Run, runner

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.leasing.lease_keeper import owner_of_process
from tiered_checkpoint_io.engine.ranks import world
from tiered_checkpoint_io.model.launches import JOB_VARIABLES, are_one


@pytest.fixture(scope="module")
def path():
    with runner() as path:
        yield path


@pytest.fixture
def job(memory_dir, path):
    """Starts jobs on one node, in one namespace."""
    with contextlib.ExitStack() as stack:

        def start(dirpath, **options):
            made = Run(path, dirpath, memory_dir, namespace="one", **options)
            stack.callback(made.close)
            return made

        yield start


ANOTHER_JOB = "ConfigError: another live job keeps its checkpoints in this node's memory under the same namespace"


TASK = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
#: Environment that two jobs share: nothing, a shell's own word, or tasks of Slurm that train each for itself.
SHARED = [
    [{}, {}],
    [{"TIERED_CHECKPOINT_OWNER": "a/b"}, {"TIERED_CHECKPOINT_OWNER": "a/b"}],
    [{**TASK, "SLURM_PROCID": "0"}, {**TASK, "SLURM_PROCID": "1"}],
]


@pytest.mark.parametrize("environments", SHARED, ids=["nothing", "shell", "Slurm"])
def test_jobs_are_two_whatever_they_share_though_they_upload_nothing(job, tmp_path, environments):
    first, second = (job(str(tmp_path), env=env) for env in environments)
    assert first.do("keep a.ckpt") == "ok"
    refused = second.do("keep b.ckpt")
    assert refused.startswith(f"{ANOTHER_JOB}: that of {tmp_path}, process {first.pid}")
    assert "a namespace of its own" in refused
    assert first.do("keep c.ckpt") == "ok"
    # A restart of the same job takes over at once.
    first.kill()
    assert second.do("keep b.ckpt") == "ok"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_ranks_of_a_launch_are_one_before_they_know_each_other(name, job, tmp_path):
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "SLURM_NTASKS": "2"}
    ranks = [job(str(tmp_path), env={name: str(rank), **meet}) for rank in range(2)]
    assert [each.do(f"save {number}.ckpt") for number, each in enumerate(ranks)] == ["ok", "ok"]


def test_who_is_one_launch():
    assert are_one("a", "a")
    assert are_one("shell/a", "shell/a/b")
    assert are_one("a/b/c/d", "b")
    assert not are_one("shell/a", "shell/b")
    assert not are_one("shell/a/c", "shell/b/c2")
    # All of its line but the end may be forgotten.
    assert are_one("p/a", "a/b")


def owner_in(environment):
    """Returns the owner of a new process with an environment, and the environment that it hands on."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        os.write(write, json.dumps([owner_of_process(SYSTEM), dict(os.environ)]).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = json.loads(os.read(read, 1 << 20))
    os.close(read)
    os.close(write)
    return found


@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        pytest.param({}, {}, True, id="no-scheduler"),
        pytest.param({"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": ""}, True, id="variables-stripped"),
        pytest.param({"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "2"}, False, id="sbatch-from-a-login-node"),
        pytest.param({"PBS_JOBID": "12[1].host"}, {"PBS_JOBID": "13[1].host"}, False, id="qsub-of-an-array"),
        pytest.param({"LSB_JOBID": "5", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "5"}, True, id="lsf-child"),
    ],
)
def test_an_owner_is_handed_on_within_a_job_only(first, second, one):
    unwanted = ("TIERED_CHECKPOINT_OWNER", "TIERED_CHECKPOINT_OWNER_JOB", *JOB_VARIABLES)
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    before, environment = owner_in(clean | first)
    after, environment = owner_in(environment | second)
    assert are_one(before, after) == one
    child, _ = owner_in(environment)
    assert are_one(after, child)
    assert are_one(before, child) == one
    assert not are_one(child, owner_in(environment)[0]), "two that one process starts are two"
    # The scheduler starts a job that is requeued again with what it was submitted with.
    again, _ = owner_in(environment | second | {"SLURM_JOB_ID": "9"})
    assert not are_one(after, again)


@pytest.mark.parametrize(
    ("rank", "environment", "leads"),
    [
        (8, {"LOCAL_RANK": "0"}, True),
        (0, {"LOCAL_RANK": "1"}, False),
        (8, {"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, True),
        (9, {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
        # torchrun, and what one task spawns itself, within a job of Slurm's.
        (9, {"LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
        (1, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
        (8, {"OMPI_COMM_WORLD_RANK": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True),
        (8, {}, False),
        (0, {}, True),
    ],
)
def test_one_process_of_each_node_leads_whatever_started_it(rank, environment, leads, monkeypatch):
    names = ("LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "current_rank", lambda: rank)
    assert world.leads_node() == leads
    # If the first rank of a node is not known, any rank may continue the node's uploads.
    is_told = "LOCAL_RANK" in environment or str(rank) in (
        environment.get(name) for name in names if "LOCAL" not in name
    )
    assert world.may_lead_node() == (leads or not is_told)
