"""What the last saves of a process held, by digests: what no step changes any more is seen there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class _Held(NamedTuple):
    """What saves held: the last one, and the last one of an earlier step."""

    step: int
    digest: str
    earlier_step: int = -1
    earlier_digest: str = ""


class LastTensors:
    """What the last saves of this process held."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def unchanged(self, step: int, digests: Mapping[str, str]) -> Iterator[tuple[str, int]]:
        """Takes note of a save; what of it is the same as at an earlier step, and at which."""
        for what, digest in digests.items():
            last = self._held.get(what)
            if last is None or step < last.step:
                now = _Held(step, digest)
            elif step == last.step:
                # A second save of one step, such as that of the weights behind that of their averages.
                now = last._replace(digest=digest)
            else:
                now = _Held(step, digest, last.step, last.digest)
            self._held[what] = now
            if now.earlier_step >= 0 and now.earlier_digest == digest:
                yield what, now.earlier_step
