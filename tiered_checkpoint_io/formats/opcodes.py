"""The operations of a pickle of protocol 2, as far as one is taken apart and put together by them."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_checkpoint_io.formats.skeleton import DoubtError

#: Bytes of the arguments of each operation that a pickle of protocol 2 may have, and whose length is fixed.
_FIXED = {
    **dict.fromkeys(b"(.01]})lt\x85\x86\x87\x88\x89Nsuaebo2dR\x81Q", 0),
    **dict.fromkeys(b"Kqh\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jrj\x84", 4),
    **dict.fromkeys(b"G", 8),
}
#: Those with a length in front, of so many bytes.
_COUNTED = {ord("X"): 4, ord("T"): 4, ord("U"): 1, 0x8A: 1, 0x8B: 4}
BINPUT, LONG_BINPUT, BINGET, LONG_BINGET, BINUNICODE, GLOBAL = b"qrhjXc"
#: Numbers of a fixed length.
_NUMBERS = frozenset(b"KMJG")
#: After a function: it is called without arguments.
CALLED = b")R"


def put(number: int) -> bytes:
    return b"q%c" % number if number < 256 else b"r" + number.to_bytes(4, "little")


def get(number: int) -> bytes:
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")


def integer(value: int) -> bytes:
    if value < 1 << 8:
        return b"K%c" % value
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    length = (value.bit_length() >> 3) + 1
    return b"\x8a%c" % length + value.to_bytes(length, "little")


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def after(data: bytes, at: int) -> int:
    """Where the operation at ``at`` ends."""
    code = data[at]
    size = _FIXED.get(code)
    if size is not None:
        return at + 1 + size
    size = _COUNTED.get(code)
    if size is not None:
        return at + 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
    if code == GLOBAL:
        return data.index(b"\n", data.index(b"\n", at) + 1) + 1
    raise DoubtError(f"operation {code} of a pickle")


def values_in(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the bytes of numbers and texts begin and end: no later operation depends on these."""
    at = 0
    while at < len(data):
        begin, at = at, after(data, at)
        code = data[begin]
        if code in _NUMBERS:
            yield begin + 1, at
        elif code in _COUNTED:
            yield begin + 1 + _COUNTED[code], at


def string_of(data: bytes, token: int) -> bytes:
    """How the object is written that has a number in a piece; it has to be a string."""
    stored, at, before = put(token), 0, 0
    while at < len(data):
        if data[at] == stored[0] and data.startswith(stored, at):
            if data[before] != BINUNICODE:
                break
            return data[before:at]
        before, at = at, after(data, at)
    raise DoubtError("an object is met in several pieces")
