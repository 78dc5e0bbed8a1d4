"""The files of deploy/: valid for Kubernetes and the shell, and their commands are ones that there are."""

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import torch.distributed.run
import typer
import yaml
from support.waiting import until

from tiered_checkpoint_io import cli

ROOT = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((ROOT / each) for each in ("kubernetes/emptydir.yaml", "kubernetes/hostpath.yaml"))
HYPERPOD = ROOT / "hyperpod/pytorchjob.yaml"
SCRIPTS = [ROOT / "slurm/train.sbatch", ROOT / "slurm/epilog.sh", ROOT / "docker/run.sh"]


def stand_in(tmp_path, name, script):
    """Makes a program of that name; returns a PATH on which it replaces the real one."""
    (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def pods():
    """Yields each pod's specification, with its file."""
    for path in MANIFESTS:
        for document in documents(path):
            yield path, document["spec"]["template"]["spec"]
    (job,) = documents(HYPERPOD)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        yield HYPERPOD, {"restartPolicy": replica["restartPolicy"], **replica["template"]["spec"]}


def containers(pod):
    return [*pod.get("initContainers", []), *pod["containers"]]


def judged_by_shellcheck(text):
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, "--shell=bash", "-"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    subprocess.run(["bash", "-n"], input=text, check=True, text=True, timeout=60)


def test_manifests_are_valid():
    for path in MANIFESTS:
        for document in documents(path):
            kubernetes_validate.validate(document, "1.32", strict=True)
    for _, spec in pods():
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gpt-1"}, "spec": spec}
        kubernetes_validate.validate(document, "1.32", strict=True)


def test_torchrun_leaves_training_its_grace_time(monkeypatch):
    (job,) = documents(HYPERPOD)
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    # An option that an older torchrun does not know would keep the pod from starting.
    assert not [each for each in container["command"] if "shutdown" in each]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    parsed = torch.distributed.run.get_args_parser().parse_args(container["command"][1:])
    config, *_ = torch.distributed.run.config_from_args(parsed)
    assert 30 < config.shutdown_timeout < pod["terminationGracePeriodSeconds"]


def test_pods_have_what_they_mount_and_one_user():
    for path, spec in pods():
        volumes = {each["name"] for each in spec["volumes"]}
        for container in containers(spec):
            assert {each["name"] for each in container["volumeMounts"]} <= volumes, path
        users = {spec.get("securityContext", {}).get("runAsUser")}
        users |= {each.get("securityContext", {}).get("runAsUser") for each in spec["containers"]}
        assert len(users - {None}) <= 1, path


def test_scripts_are_shell():
    for script in SCRIPTS:
        judged_by_shellcheck(script.read_text())
    for _, spec in pods():
        for container in containers(spec):
            if container["command"] == ["bash", "-c"]:
                judged_by_shellcheck(container["args"][0])


def commands():
    """Yields each use of ``tiered-ckpt``: its arguments."""
    texts = [path.read_text() for path in SCRIPTS]
    for _, spec in pods():
        for container in containers(spec):
            texts += container.get("args", [])
            stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            texts.append(shlex.join(stop))
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            if not line.lstrip().startswith("#"):
                for match in re.finditer(r"tiered-ckpt ([^;'|&>]*)", line):
                    yield shlex.split(match[1])


def test_commands_are_understood():
    known = typer.main.get_command(cli.app).commands
    used = list(commands())
    assert {"flush", "status"} <= {name for name, *_ in used}
    for name, *arguments in used:
        known[name].make_context(name, arguments, help_option_names=["-h", "--help"])


@pytest.mark.parametrize("has_saved", [True, False])
def test_the_sidecar_flushes_when_it_has_to_end(tmp_path, has_saved):
    (sidecar, *_) = containers(next(spec for path, spec in pods() if path.name == "emptydir.yaml"))
    note = f'echo "$1" >> {tmp_path}/steps'
    drain = f"trap 'echo ended >> {tmp_path}/steps; exit 0' TERM; {note}; sleep 30 & wait; exit 1"
    ends = f"[ $1 != status ] || exit {0 if has_saved else 1}"
    environment = stand_in(tmp_path, "tiered-ckpt", f"case $* in *--stay*) {drain};; esac\n{note}\n{ends}")
    process = subprocess.Popen([*sidecar["command"], *sidecar["args"]], env=environment, start_new_session=True)
    try:
        last, steps = "flush" if has_saved else "status", tmp_path / "steps"
        until(lambda: steps.exists() and last in steps.read_text())
        time.sleep(0.2)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    steps = ["status", "flush", "ended", "flush"] if has_saved else ["status", "flush"]
    assert (tmp_path / "steps").read_text().split() == steps


@pytest.mark.parametrize("status", [0, 138])
def test_the_job_flushes_each_node_where_training_did_not_end_well(tmp_path, status):
    srun = f'echo "$@" >> {tmp_path}/steps\ncase "$*" in *python*) exit {status};; esac'
    environment = {**stand_in(tmp_path, "srun", srun), "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", str(SCRIPTS[0])], env=environment, timeout=60)
    assert done.returncode == status
    steps = (tmp_path / "steps").read_text().splitlines()
    flush = "--nodes=2 --ntasks-per-node=1 tiered-ckpt flush --namespace gpt-1 --timeout 60"
    # Ranks that got no notice end with the one that did.
    assert steps == ["--kill-on-bad-exit=1 python train.py", *([flush] if status else [])]


def test_the_epilog_flushes_each_namespace_and_never_fails(tmp_path):
    for name in ("runuser", "logger"):
        path = stand_in(tmp_path, name, f'echo {name} "$@" >> {tmp_path}/steps\nexit 1')
    for name in ("gpt-1", "gpt-2"):
        (tmp_path / "memory/tiered-1000" / name).mkdir(parents=True)
    environment = {**path, "TIERED_MEMORY_DIR": str(tmp_path / "memory")}
    job = {"SLURM_JOB_USER": "ada", "SLURM_JOB_UID": "1000"}
    for given in ({}, job):
        assert subprocess.run(["bash", str(SCRIPTS[1])], env={**environment, **given}, timeout=60).returncode == 0
    steps = (tmp_path / "steps").read_text().splitlines()
    memory = tmp_path / "memory"
    wanted = (
        [
            f"runuser -u ada -- tiered-ckpt flush --ended --memory-dir {memory} --namespace {each} --timeout 80",
            f"logger -t tiered-epilog flush of namespace {each} failed",
        ]
        for each in ("gpt-1", "gpt-2")
    )
    assert steps == list(itertools.chain.from_iterable(wanted))
