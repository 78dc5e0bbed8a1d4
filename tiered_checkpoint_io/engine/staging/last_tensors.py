"""What the last saves of a process held, by digests: what no step changes any more is seen there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple


class Digest(NamedTuple):
    """Of some bytes of a file.

    Attributes:
        chunks: Of the chunks that hold nothing else: they have been hashed anyway.
        ends: Of the bytes before and after these, which are hashed for this alone; None where they were not.
    """

    chunks: str
    ends: str | None


class _Held(NamedTuple):
    """What saves held: the last one, and the last one of an earlier step."""

    step: int
    digest: Digest
    earlier_step: int = -1
    earlier_digest: Digest | None = None


class LastTensors:
    """What the last saves of this process held."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def unchanged(self, step: int, found: Mapping[str, tuple[str, Callable[[], str]]]) -> Iterator[tuple[str, int]]:
        """Takes note of a save; what of it is the same as at an earlier step, and at which.

        Args:
            step: The training step.
            found: By what it is, the digest of its whole chunks, and what gives that of the bytes around them: asked
                only where the chunks are those of the earlier step, or there is none.
        """
        for what, (chunks, ends) in found.items():
            last = self._held.get(what)
            earlier: tuple[int, Digest | None] = (-1, None)
            if last is not None and step >= last.step:
                # A second save of one step is such as that of the weights after that of their averages.
                earlier = last[2:] if step == last.step else last[:2]
            before = earlier[1]
            if last is not None and (step, chunks) == (last.step, last.digest.chunks):
                digest = last.digest
            else:
                digest = Digest(chunks, ends() if before is None or before.chunks == chunks else None)
            self._held[what] = _Held(step, digest, *earlier)
            if digest.ends is not None and digest == before:
                yield what, earlier[0]
