"""The zip file around a pickle and its tensors, kept from one save for the next: only the pickle's record changes.

Records begin at multiples of the alignment. So a pickle of another length moves all that follows it by a multiple of
that: the padding before the second record changes, and so do offsets and some checksums; nothing else does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiered_checkpoint_io.formats.filling import Segment, Segments
from tiered_checkpoint_io.formats.skeleton import DoubtError

_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
#: What stands in a field of 4 bytes whose value stands in the extra field, in 8 bytes.
_ELSEWHERE = (1 << 32) - 1
_MASK = (1 << 64) - 1
#: What torch adds to each checksum that it combines with those before.
_GOLDEN = 0x9E3779B9
_ZIP_64, _FILLER = b"\1\0", b"FB"
#: torch's id of a file: a hash of its records' names, and one of their checksums, 20 digits each.
_ID = b"/.data/serialization_id"
_ID_HALF = 20


class Records:
    """All of a file but its pickle and what tensors hold.

    Attributes:
        offsets: Where in the file tensors' bytes belong.
        lengths: How many there are.
        size: Of the file that was read, bytes.
    """

    def __init__(
        self, segments: Sequence[Segment], offsets: list[int], lengths: list[int], size: int, alignment: int
    ) -> None:
        """Reads a file that ``torch.save`` has laid out.

        Args:
            segments: What surrounds tensors' bytes.
            offsets: Where these belong.
            lengths: How many there are.
            size: The file's, bytes.
            alignment: At multiples of which records begin, bytes.

        Raises:
            DoubtError: It is laid out in another way than is assumed here.
        """
        self.offsets, self.lengths = np.array(offsets, np.int64), np.array(lengths, np.int64)
        self.size, self._alignment = size, alignment
        head = segments[0].data
        begin, name_end = _contents(head, 0)
        if not bytes(head[_HEADER.size : name_end]).endswith(b"/data.pkl"):
            raise DoubtError("the pickle is not the first record")
        self._head = bytes(head[:begin])
        tail = segments[-1]
        end_64 = size - _END.size - _LOCATOR.size - _END_64.size
        magic, *_, count, length, directory = _END_64.unpack_from(tail.data, end_64 - tail.offset)
        if magic != b"PK\6\6" or directory + length != end_64:
            raise DoubtError("the zip file ends in another way")
        entries = _entries(tail.data, directory - tail.offset, count)
        second = entries[1][2]
        self._fixed_from, name_end = _contents(head, second)
        self._second = bytes(head[second:name_end])
        self._pickle_size = second - begin - _DESCRIPTOR.size
        # What follows the second record's header only moves. It is kept as one row of bytes.
        fixed = [Segment(self._fixed_from, head[self._fixed_from :]), *segments[1:]]
        row = Segments.of(fixed)
        self._starts, self._cuts, self._fixed = row.offsets, row.cuts, bytes(row.data)
        # Of one segment, its begin is the pickle's.
        self._tail_from = 0 if len(segments) > 1 else -self._fixed_from
        self._note_places(entries, directory, end_64)
        pickled = self.pickle_in(segments)
        if self.moved_by(pickled) or list(self.around(pickled)) != list(segments):
            raise DoubtError("the file is laid out in another way")

    def pickle_in(self, segments: Sequence[Segment]) -> bytes:
        """The pickle of the file."""
        return bytes(segments[0].data[len(self._head) : len(self._head) + self._pickle_size])

    def moved_by(self, pickled: bytes) -> int:
        """By how many bytes all that follows another pickle moves.

        Raises:
            DoubtError: The file would be laid out in another way.
        """
        second = len(self._head) + len(pickled) + _DESCRIPTOR.size
        move = second + len(self._second) + 4 + self._padding(second) - self._fixed_from
        if np.any((self._limits < _ELSEWHERE) != (self._limits + move < _ELSEWHERE)):
            raise DoubtError("a record moves over the limit of 4 GiB")
        return move

    # ------------------------------------------------------------------------------------- reading
    def _note_places(self, entries: list[tuple[int, int, int, int]], directory: int, end_64: int) -> None:
        """Notes where in what is kept there stand offsets within the file, of 4 and of 8 bytes; and checksums."""
        # Places in the last segment, and offsets in the file.
        tail = int(self._cuts[-2]) + self._tail_from
        at_offset = int(self._cuts[-2] - self._starts[-1])
        self._directory = directory + at_offset
        # As they are combined; neither the pickle's nor the id's own is one of them.
        self._terms = [crc + _GOLDEN for _, crc, _, _ in entries[1:-1]]
        # The first two records do not move.
        moving = entries[2:]
        self._moving = np.array([offset for _, _, offset, _ in moving], np.int64)
        headers = self._in_fixed(self._moving)
        narrow, wide = [], []
        for (at, _, offset, place), header in zip(moving, headers.tolist(), strict=True):
            if offset < _ELSEWHERE:
                narrow.append(place + tail)
            else:
                # The record's own header has it as well.
                name = int.from_bytes(self._fixed[header + 26 : header + 28], "little")
                wide += [place + tail, header + _HEADER.size + name + (place - at - _ENTRY.size - name)]
        if directory < _ELSEWHERE:
            narrow.append(self.size - 6 + at_offset)
        wide += [end_64 + _END_64.size - 8 + at_offset, end_64 + _END_64.size + 8 + at_offset]
        self._narrow, self._wide = np.array(narrow, np.int64), np.array(wide, np.int64)
        self._id_entry = entries[-1][0] + tail
        self._second_entry = entries[1][0] + tail
        self._id = _contents(memoryview(self._fixed), int(headers[-1]))[0]
        self._limits = np.append(self._moving, directory)

    def _in_fixed(self, offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where in what is kept that stands which stands there in the file."""
        index = np.searchsorted(self._starts, offsets, "right") - 1
        moved: np.ndarray[Any, Any] = self._cuts[index] + offsets - self._starts[index]
        return moved

    # ------------------------------------------------------------------------------------- writing
    def _padding(self, second: int) -> int:
        return -(second + len(self._second) + 4) % self._alignment

    def around(self, pickled: bytes) -> Segments:
        """All but tensors' bytes of the file of another pickle, where :meth:`moved_by` has none against it."""
        crc, length = zlib.crc32(pickled), len(pickled)
        second = len(self._head) + length + _DESCRIPTOR.size
        padding = self._padding(second)
        header = bytearray(self._second)
        struct.pack_into("<H", header, _HEADER.size - 2, 4 + padding)
        filler = _FILLER + struct.pack("<H", padding) + b"Z" * padding
        move = second + len(header) + len(filler) - self._fixed_from
        fixed = bytearray(self._fixed)
        _add(fixed, self._narrow, move, "<u4")
        _add(fixed, self._wide, move, "<u8")
        # Of the pickle's entry, its checksum and sizes; of the next one, its offset.
        struct.pack_into("<3I", fixed, self._directory + 16, crc, length, length)
        struct.pack_into("<I", fixed, self._second_entry + _ENTRY.size - 4, second)
        self._identify(fixed, crc)
        descriptor = _DESCRIPTOR.pack(b"PK\7\10", crc, length, length)
        front = b"".join((self._head, pickled, descriptor, header, filler))
        # The pickle's segment goes on with the first one of what is kept.
        cuts, offsets = self._cuts + len(front), self._starts + move
        cuts[0] = offsets[0] = 0
        return Segments(memoryview(front + fixed), offsets, cuts)

    def _identify(self, fixed: bytearray, crc: int) -> None:
        """Writes torch's id of the file, and its checksum."""
        combined = 0
        for term in (crc + _GOLDEN, *self._terms):
            # Tens of thousands of times, each of which needs the one before.
            combined ^= (term + (combined << 6) + (combined >> 2)) & _MASK
        at, end = self._id, self._id + 2 * _ID_HALF
        fixed[at + _ID_HALF : end] = b"%020d" % combined
        crc_of_id = zlib.crc32(fixed[at:end])
        struct.pack_into("<I", fixed, end + 4, crc_of_id)
        struct.pack_into("<I", fixed, self._id_entry + 16, crc_of_id)


def _contents(data: memoryview, at: int) -> tuple[int, int]:
    """Where the contents of the record begin whose header stands at ``at``, and where its name ends."""
    magic, *_, name, extra = _HEADER.unpack_from(data, at)
    name_end = filler = at + _HEADER.size + name
    if data[filler : filler + 2] == _ZIP_64:
        filler += 4 + int.from_bytes(data[filler + 2 : filler + 4], "little")
    if magic != b"PK\3\4" or data[filler : filler + 2] != _FILLER:
        raise DoubtError("a record's header is another")
    return name_end + extra, name_end


def _entries(data: memoryview, at: int, count: int) -> list[tuple[int, int, int, int]]:
    """Of each entry of the directory: where it stands, its record's checksum and offset, and where that stands."""
    found = []
    last = False
    for index in range(count):
        magic, *_, crc, packed, size, name, extra, comment, _, _, _, offset = _ENTRY.unpack_from(data, at)
        place, name_at = at + _ENTRY.size - 4, at + _ENTRY.size
        if magic != b"PK\1\2" or comment or (index < 2 and extra):
            raise DoubtError("an entry of the directory is another")
        if offset == _ELSEWHERE:
            # Sizes come before it, where they are too large as well.
            place = name_at + name + 4 + 8 * ((size == _ELSEWHERE) + (packed == _ELSEWHERE))
            offset = int.from_bytes(data[place : place + 8], "little")
        last = data[name_at : name_at + name].tobytes().endswith(_ID)
        found.append((at, crc, offset, place))
        at = name_at + name + extra
    if not last:
        raise DoubtError("the last record is another")
    return found


def _add(data: bytearray, places: np.ndarray[Any, Any], more: int, kind: str) -> None:
    """Adds to the integers that stand in bytes."""
    # An integer may begin at any byte.
    all_of_them: np.ndarray[Any, Any] = np.ndarray((len(data) - np.dtype(kind).itemsize + 1,), kind, data, strides=(1,))
    all_of_them[places] = (all_of_them[places].astype(np.int64) + more).astype(kind)
