"""A planned file: what surrounds the tensors' bytes, and where these come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch

from tiered_checkpoint_io.formats.filling import Filling, Region, Segment, default_threads, devices_of, hash_chunks
from tiered_checkpoint_io.formats.writing import Untouched
from tiered_checkpoint_io.model.hashing import chunk_size_for


@dataclass(frozen=True, eq=False)
class Image:
    """A planned file.

    It refers to the state's own storages, and shows what they hold when it is filled in, not when
    it was planned: fill it before anything may change them. It keeps them alive.
    """

    size: int
    #: What is no tensor's, or what makes that when it is first asked for.
    around: Sequence[Segment] | Callable[[], Sequence[Segment]]
    regions: Sequence[Region]
    _: KW_ONLY
    #: Whether tensors' bytes are copied straight from their storages; False where ``torch.save`` had to write the whole
    #: file beforehand.
    planned: bool = True

    @cached_property
    def segments(self) -> Sequence[Segment]:
        """The bytes of the file that are no tensor's."""
        return self.around() if callable(self.around) else self.around

    @property
    def chunk_size(self) -> int:
        """Bytes of one hashed chunk."""
        return chunk_size_for(self.size)

    def fill(
        self,
        view: memoryview,
        *,
        threads: int | None = None,
        pin: Callable[[memoryview], int] | None = None,
        hashed: bool = True,
        untouched: Untouched | None = None,
    ) -> tuple[str, ...]:
        """Writes the whole file, and hashes it.

        Args:
            view: Where to: writable, contiguous, at least ``size`` bytes. What follows is left as it is.
            threads: By default as many as this process's share of the node's cores.
            pin: Called with the buffer before bytes are copied from a CUDA device, which is the current one then, so
                that its owner can register it as pinned memory; it gives how many bytes, from the first on, are.
            hashed: Whether to hash it on the way; see :meth:`hashes` for later.
            untouched: What of the buffer is written by its file, and not through it. Only where :func:`is_plain`.

        Returns:
            xxh3-128 of each chunk of ``chunk_size`` bytes, as hexadecimal digits; nothing where not ``hashed``.

        Raises:
            ConfigError: A storage has become smaller since the file was planned.
        """
        target = view.cast("B") if view.format != "B" or view.ndim != 1 else view
        if len(target) < self.size:
            raise ValueError(f"the buffer has {len(target)} bytes, the image {self.size}")
        target, pinned = target[: self.size], 0
        devices = [device for device in devices_of(self.regions) if device.type == "cuda"]
        if pin is not None and devices:
            with torch.cuda.device(devices[0]):
                pinned = pin(target)
        return Filling(target, self.segments, hashed=hashed, untouched=untouched, pinned=pinned).run(
            self.regions, threads or default_threads()
        )

    def hashes(self, view: memoryview, *, threads: int | None = None) -> tuple[str, ...]:
        """The hashes of the file that was written to ``view``, as :meth:`fill` gives them.

        Hashing on the way costs less in all. Hashing later costs the caller of :meth:`fill` less.
        """
        return hash_chunks(view[: self.size], threads or default_threads())
