"""Launches: all processes that one start of a job began."""

from __future__ import annotations


def are_one(owner: str, other: str) -> bool:
    """Whether two processes belong to one launch: they have one owner, or one was started below the other.

    Two that inherited the same line from a shell, or from a process that starts jobs, do not.
    """
    line, others = owner.split("/"), other.split("/")
    return line[-1] in others or others[-1] in line
