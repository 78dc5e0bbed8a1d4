"""Whether a resume restores what its checkpoint holds of data loaders: without that, training sees data again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tiered_checkpoint_io.engine.session import Session

_LOADER = re.compile(r".*(loader|sampler).*", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim.*", re.IGNORECASE)

Path = Sequence[str]


def left_out(held: Iterable[Path], wanted: Iterable[Path]) -> list[str]:
    """The data loaders whose state a checkpoint holds and a load leaves out; none where it loads no optimizer.

    Args:
        held: The keys in the checkpoint, from the outermost on; two of each are looked at.
        wanted: The keys that are loaded.
    """
    asked = [tuple(path[:2]) for path in wanted]
    if not any(_OPTIMIZER.fullmatch(key) for path in asked for key in path):
        # An evaluation, or a start from weights.
        return []
    heads = {_head(path) for path in held} - {()}
    return sorted(".".join(head) for head in heads if not any(path[: len(head)] == head for path in asked))


def _head(path: Path) -> tuple[str, ...]:
    at = next((at for at, key in enumerate(path[:2]) if _LOADER.fullmatch(key)), None)
    return () if at is None else tuple(path[: at + 1])


def warn_of_left_out(
    session: Session, name: str, held: Iterable[Path], wanted: Iterable[Path], *, says: bool = True
) -> None:
    """As :func:`report_left_out`, of what :func:`left_out` finds."""
    missed = left_out(held, wanted)
    why = f"the state that was given to load into has no {', '.join(missed)}"
    report_left_out(session, name, len(missed), why, says=says)


def report_left_out(session: Session, name: str, count: int, why: str, *, says: bool = True) -> None:
    """Warns of data loaders that a resume leaves out.

    Args:
        session: The job's.
        name: The checkpoint.
        count: How many; nothing is said of none.
        why: They are left out, and what to do.
        says: Whether this rank warns.
    """
    if count and says:
        text = "this resume does not restore the state of %d data loader%s that %s holds, so the data starts anew: %s"
        session.log.warning(text, count, "s" if count > 1 else "", name, why)
