"""The exact bytes of a ``torch.save`` file, planned without copying tensor data.

:func:`plan` lets ``torch.save`` itself write the file, into a recorder that keeps everything but
the contents of tensors: for these it only notes where in the file they belong. :meth:`Image.fill`
then puts the file together in a buffer of the caller's, copying each tensor's storage once, in
parallel, straight from where it lies, and hashes it on the way. The result is a file that
``torch.load`` reads as it reads any other, ``mmap=True`` included, because its layout is that of
``torch.save`` alone.

Whatever cannot be laid out so (quantized tensors, backends without storages, a torch release that
lacks the means) is saved by plain ``torch.save`` into memory first; that costs time and memory, but
it is never an error.

The zip directory holds no checksums of the tensors' records: they are not known when it is written.
``torch.load`` ignores them, the manifest's hashes do their work, but ``unzip -t`` complains.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, cast

import torch

from tiered_checkpoint_io.formats.filling import (
    Filling,
    Region,
    Segment,
    StorageRegion,
    default_threads,
    devices_of,
    hash_chunks,
)
from tiered_checkpoint_io.formats.writing import Untouched
from tiered_checkpoint_io.model.hashing import chunk_size_for


class _CannotPlanError(Exception):
    """The file has another layout than expected, so its tensors' places are not known."""


# ------------------------------------------------------------------------------------------- image
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


# ---------------------------------------------------------------------------------------- planning
def plan(state: object) -> Image:
    """Plans the file that ``torch.save(state, ...)`` would write.

    Raises:
        Exception: Whatever ``torch.save`` raises for this state.
    """
    try:
        with collecting_later():
            return _plan_by_layout(state)
    except Exception:
        # Whatever the reason, torch.save is the judge: it works, or its error is the caller's.
        return _plan_by_saving(state)


#: One for each block that has switched the collector off, and is to switch it on again.
_off: list[None] = []


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Without the garbage collector, which would look at all objects of the process several times meanwhile."""
    enabled = gc.isenabled()
    _off.extend([None] * enabled)
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            del _off[-1:]


def _collect_in_child() -> None:
    # The thread that would switch it on again is not there.
    if _off:
        _off.clear()
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)


def _plan_by_layout(state: object) -> Image:
    recorder = _Recorder()
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with ExitStack() as without_data:
            pickler = _capturing_pickler(storages, without_data)
            module = cast("ModuleType", SimpleNamespace(Pickler=pickler, __name__="pickle"))
            torch.save(state, cast("BinaryIO", recorder), pickle_module=module)
        # Records come in the order in which the pickler met their storages; empty ones leave no hole.
        found = [storage for storage in storages.values() if storage.nbytes()]
    finally:
        # The pickler's class, which only the garbage collector frees, refers to the dictionary:
        # what is in it must not be kept until then.
        storages.clear()
    holes = recorder.holes
    if [length for _, length in holes] != [storage.nbytes() for storage in found]:
        raise _CannotPlanError("the file's records are not the state's storages")
    if any(storage.device.type == "meta" for storage in found):
        raise _CannotPlanError("a storage has no data")
    regions = tuple(StorageRegion(*hole, storage) for hole, storage in zip(holes, found, strict=True))
    return Image(recorder.position, recorder.segments(), regions)


def _plan_by_saving(state: object) -> Image:
    file = io.BytesIO()
    torch.save(state, file)
    data = file.getbuffer()
    return Image(len(data), (Segment(0, data),), (), planned=False)


def _capturing_pickler(storages: dict[str, torch.UntypedStorage], without_data: ExitStack) -> type[pickle.Pickler]:
    kinds = (torch.storage.TypedStorage, torch.UntypedStorage)

    class CapturingPickler(pickle.Pickler):
        """The base of the pickler that ``torch.save`` defines: sees the storages that it meets."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            original = cls.persistent_id

            def persistent_id(self: pickle.Pickler, obj: Any) -> Any:
                # Asked of every object in the state, so the answer for most of them must be quick.
                if not isinstance(obj, kinds):
                    return None
                reference = original(self, obj)
                if reference is not None:
                    storage: Any = obj
                    storages[reference[2]] = getattr(storage, "_untyped_storage", storage)
                return reference

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def dump(self, obj: Any, /) -> None:
            # The state is pickled as always; only the records that follow are written without
            # data. An object that calls torch.save while it is pickled gets all of its bytes.
            super().dump(obj)
            without_data.enter_context(torch.serialization.skip_data())

    return CapturingPickler


class _Recorder:
    """A file that is written from front to end: keeps what is written, and where it is skipped."""

    def __init__(self) -> None:
        self.position = 0
        self.holes: list[tuple[int, int]] = []
        self._segments: list[tuple[int, bytearray]] = []
        self._current = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        self._current += data
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise _CannotPlanError("the file is not written from front to end")
        if offset:
            self._end_segment()
            self.holes.append((self.position, offset))
            self.position += offset
        return self.position

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        """Nothing to do."""

    def segments(self) -> tuple[Segment, ...]:
        self._end_segment()
        return tuple(Segment(offset, memoryview(bytes(data))) for offset, data in self._segments)

    def _end_segment(self) -> None:
        if self._current:
            self._segments.append((self.position - len(self._current), self._current))
            self._current = bytearray()
