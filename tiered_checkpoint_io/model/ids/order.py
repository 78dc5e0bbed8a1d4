"""Ids of runs, saves and operations, which sort as text in the order in which these were made."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timedelta, timezone

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError

_TIME_FORMAT = "%Y%m%dT%H%M%S.%f"
_COUNTER_DIGITS = 8
_SAVE_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}-\d{8}\Z")
_RANK = re.compile(r"rank-(?P<rank>\d{5,9})\Z")


def rank_folder(rank: int) -> str:
    """Returns ``rank-00003``."""
    return f"rank-{rank:05d}"


def rank_of(folder: str) -> int | None:
    """Returns the inverse of :func:`rank_folder`; None for other text."""
    match = _RANK.match(folder)
    return int(match["rank"]) if match else None


def new_run_id(after: str | None = None, now: float | None = None, *, clock: Clock = SYSTEM) -> str:
    """Returns a run's id; ids sort, as text, in the order in which runs began.

    The new id sorts after ``after``, a save id seen in any tier, even if this machine's clock is behind the clock of
    the other machine (a Lamport clock).
    """
    stamp = datetime.fromtimestamp(clock.wall() if now is None else now, timezone.utc)
    if after is not None and is_save_id(after):
        stamp = max(stamp, _time_of(after) + timedelta(microseconds=1))
    return f"{stamp.strftime(_TIME_FORMAT)}-{clock.token(4)}"


def _time_of(some_id: str) -> datetime:
    return datetime.strptime(some_id.partition("-")[0], _TIME_FORMAT).replace(tzinfo=timezone.utc)


def save_id(run_id: str, counter: int) -> str:
    """Returns the id of the ``counter``-th operation of a run; ids sort, as text, in order of their making."""
    return f"{run_id}-{counter:08d}"


def before_its_run(save_id: str) -> str:
    """Returns a new id that sorts before all ids of this save's run, and after the ids of earlier runs.

    New ids of several saves of the run sort as the saves do.
    """
    began = _time_of(validate_save_id(save_id)) - timedelta(microseconds=1)
    return f"{began.strftime(_TIME_FORMAT)}-{save_id.partition('-')[2]}"


def save_id_of_ranks(run_id: str, series: str, repeat: int, step: int) -> str:
    """Returns the id of a save of ranks that do not communicate: equal arguments give equal ids.

    Within a series (see :func:`series_of`), ids sort by the repeat, which counts how often the series has gone back to
    a step that it had saved, and then by the step, -1 if it is not known. Ids of another series or another run differ.
    """
    random = run_id.partition("-")[2]
    turn, counter = divmod(max(0, step), 10**_COUNTER_DIGITS)
    moved = _time_of(run_id) + timedelta(milliseconds=repeat, microseconds=turn)
    mark = hashlib.sha256(f"{random}/{series}".encode()).hexdigest()[: len(random)]
    return save_id(f"{moved.strftime(_TIME_FORMAT)}-{mark}", counter)


def is_save_id(text: str) -> bool:
    """Returns True if the text is a save id."""
    return _SAVE_ID.match(text) is not None


def validate_save_id(text: str) -> str:
    """Returns a save id, which is safe as a file's name; raises ConfigError for other text."""
    if not isinstance(text, str) or not is_save_id(text):
        raise ConfigError(f"not a save id: {text!r}")
    return text


def run_id_of(save_id: str) -> str:
    """Returns the run whose operation this is."""
    return save_id.rpartition("-")[0]


def line_of(save_id: str) -> str:
    """Returns the common part of save ids whose order is known: one process's, or the ranks' for one series."""
    return run_id_of(save_id).rpartition("-")[2]


def part_op_id(save_id: str, rank: int, *, commits: bool) -> str:
    """Returns the id of the operation that drains a part: the save's own for the part that commits it.

    Ids of other ranks' parts (``<save_id>.rank-00003``) sort after it, and before ids of later saves.
    """
    return save_id if commits else f"{save_id}.{rank_folder(rank)}"


def save_id_of_op(op_id: str) -> str:
    """Returns the save that an operation is about; the id of an alias, delete or cancel itself."""
    return op_id.partition(".rank-")[0]


def validate_op_id(text: str) -> str:
    """Returns an operation's id, which is safe as a file's name; raises ConfigError for other text."""
    head, dot, rank = text.partition(".rank-") if isinstance(text, str) else ("", "", "")
    if not is_save_id(head) or (dot and rank_of(f"rank-{rank}") is None):
        raise ConfigError(f"not an operation's id: {text!r}")
    return text
