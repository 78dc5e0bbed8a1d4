"""Launches: all processes that one start of a job began."""

from __future__ import annotations

from collections.abc import Mapping

#: The job's number, by Slurm, PBS and LSF. Tasks of an LSF array share one, which does no harm: the scheduler starts
#: each of them, so none inherits from another.
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def are_one(owner: str, other: str) -> bool:
    """Returns True if two processes belong to one launch: one owner, or one was started below the other.

    Two that inherited the same line from a shell, or from a process that starts jobs, do not.
    """
    line, others = owner.split("/"), other.split("/")
    return line[-1] in others or others[-1] in line


def job_of(environment: Mapping[str, str]) -> str:
    """Returns the scheduler's job that a process with this environment is in; empty if none is known."""
    return " ".join(filter(None, (environment.get(name) for name in JOB_VARIABLES)))


def is_another_job(job: str, recorded: str) -> bool:
    """Returns True if a process in a job got its environment from outside: from another job, or from none.

    Schedulers hand the environment of the process that submits a job on to that job. A process that knows no job may
    just have been started without the scheduler's variables, so that proves nothing.
    """
    return not set(job.split()) <= set(recorded.split())
