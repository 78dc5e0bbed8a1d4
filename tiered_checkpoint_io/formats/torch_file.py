"""The exact bytes of a ``torch.save`` file, planned without copying tensor data.

:func:`plan` pickles a state in one pass, as ``torch.save`` does, and computes the zip file around the pickle and the
tensors' bytes. :meth:`Image.fill` then puts the file together in a buffer of the caller's, and copies each storage
once. The file is that of ``torch.save``, so ``torch.load`` reads it as any other, with ``mmap=True`` too.

The layout is compared with ``torch.save`` once in a process, byte for byte. If it differs, or a state can't be planned,
``torch.save`` writes the whole file into memory first. That costs time and memory, but it is never an error.

The zip directory holds no checksums of the tensors' records, because these are not known when it is written.
``torch.load`` ignores them, the manifest's hashes do their work, but ``unzip -t`` complains.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tiered_checkpoint_io.formats import safe_pickle, safe_values
from tiered_checkpoint_io.formats.image import Image, Segment, Segments, StorageRegions
from tiered_checkpoint_io.formats.parallel import collecting_later

_CPU = torch.device("cpu")
#: Storage class and bytes of an element, of the dtypes that are pickled with such a class.
_CLASSES: dict[torch.dtype, tuple[Any, int]] = {
    dtype: (getattr(torch, f"{name}Storage"), dtype.itemsize)
    for dtype, name in [
        (torch.float64, "Double"),
        (torch.float32, "Float"),
        (torch.float16, "Half"),
        (torch.bfloat16, "BFloat16"),
        (torch.int64, "Long"),
        (torch.int32, "Int"),
        (torch.int16, "Short"),
        (torch.int8, "Char"),
        (torch.uint8, "Byte"),
        (torch.bool, "Bool"),
        (torch.complex64, "ComplexFloat"),
        (torch.complex128, "ComplexDouble"),
    ]
}
#: Properties of a tensor that torch pickles in other ways; the last one is not in all releases of torch.
_ODD = [getattr(torch.Tensor, name) for name in ("is_conj", "is_neg", "has_names") if hasattr(torch.Tensor, name)]
#: Tensors that are looked at together, while they are in the core's cache.
_AT_ONCE = 256


class _UnplannedError(Exception):
    """``torch.save`` may write another file than the one planned here."""


# ------------------------------------------------------------------------------------------ planning
def plan(state: object) -> Image:
    """Plans the file that ``torch.save(state, ...)`` would write; raises as it does."""
    try:
        return _planned(state, _format(_environment()))
    except Exception:
        # For any reason, torch.save is the judge: it works, or its error is the caller's.
        file = io.BytesIO()
        torch.save(state, file)
        data = file.getbuffer()
        return Image(len(data), (Segment(0, data),), (), planned=False)


def _planned(state: object, form: _Format) -> Image:
    with collecting_later():
        pickled, storages = _pickled(state)
        devices, sizes = storages.devices(), list(map(torch.UntypedStorage.nbytes, storages.found))
        records = _Records(form, pickled, sizes)
    filled = [storage for storage, size in zip(storages.found, sizes, strict=True) if size]
    lengths = np.array(list(filter(None, sizes)), np.int64)
    regions = StorageRegions(records.offsets, lengths, filled, np.zeros(len(filled), np.int64), devices)
    return Image(records.size, records.around, regions)


# ------------------------------------------------------------------------------------------ pickling
class _Pickler(pickle.Pickler):
    """Takes attributes."""


class _Hooks:
    """The empty dictionary of hooks that torch pickles with each tensor: an object of its own every time."""

    __slots__ = ()
    reduced = (OrderedDict, ())


_NO_STORAGE = {str, int, float, bool, type(None), tuple, list, dict, OrderedDict, FunctionType, type}
_NO_STORAGE |= {torch.Tensor, torch.nn.Parameter, _Hooks}


class _Storages:
    """The storages of a state, in the order in which the pickler meets them."""

    def __init__(self) -> None:
        self.found: list[torch.UntypedStorage] = []
        #: The names of their records, by identity.
        self.keys: dict[int, str] = {}
        #: The devices they are on, as torch names them.
        self.locations: set[str] = set()
        #: The tensors that were met in them.
        self.tensors: list[torch.Tensor] = []
        #: Addresses of storages that were met as such, and their dtypes.
        self._met: list[tuple[int, torch.dtype]] = []

    def add(self, storage: torch.UntypedStorage) -> str:
        """Returns the name of the record of a storage that is new."""
        key = self.keys[storage._cdata] = str(len(self.found))
        self.found.append(storage)
        return key

    def reference(self, storage: Any) -> tuple[Any, ...]:
        """Returns the object that ``torch.save`` pickles in the place of a storage."""
        untyped, dtype = getattr(storage, "_untyped_storage", storage), torch.uint8
        if getattr(storage, "_fake_device", None) is not None:
            raise _UnplannedError("a storage has no data")
        if untyped is storage:
            serialization: Any = torch.serialization
            kind, count = serialization.normalize_storage_type(type(storage)), untyped.nbytes()
        else:
            kind, count = getattr(torch, storage._pickle_storage_type()), storage._size()
            dtype = storage.dtype
        self._met.append((untyped.data_ptr(), dtype))
        return "storage", kind, self.keys.get(untyped._cdata) or self.add(untyped), self.location(untyped), count

    def location(self, storage: Any) -> str:
        """Returns torch's name of the device of a storage."""
        location: str = torch.serialization.location_tag(storage)
        self.locations.add(location)
        return location

    def are_plain(self) -> bool:
        """Returns whether torch pickles all tensors in the same way."""
        parts = (self.tensors[start : start + _AT_ONCE] for start in range(0, len(self.tensors), _AT_ONCE))
        return not any(chain.from_iterable(map(is_odd, some) for some in parts for is_odd in _ODD))

    def check_dtypes(self) -> None:
        """Raises if memory is met with two dtypes, which torch refuses."""
        addresses = np.sort(np.array(list(map(torch.UntypedStorage.data_ptr, self.found)), np.int64))
        if len(self.found) == len(self.tensors) + len(self._met) and not (addresses[1:] == addresses[:-1]).any():
            return
        met = {(each.untyped_storage().data_ptr(), each.dtype) for each in self.tensors}.union(self._met)
        if len(met) > len({address or dtype for address, dtype in met}):
            raise _UnplannedError("memory is met with two dtypes")

    def devices(self) -> set[torch.device]:
        """Returns the devices that the storages are on."""
        found = {_CPU} if not self.locations else set(map(attrgetter("device"), self.found))
        if any(device.type == "meta" for device in found):
            raise _UnplannedError("a storage has no data")
        return found


def _pickled(state: object, *, is_careful: bool = False) -> tuple[bytes, _Storages]:
    """Returns the pickle that ``torch.save`` makes, and the storages that it refers to.

    Each tensor is looked at more closely if some have turned out to be of an uncommon kind.
    """
    storages = _Storages()
    storage: Any = None
    reference: Any = None
    # Called for thousands of tensors: names are looked up once.
    tensor_type: Any = torch.Tensor
    rebuild, hooks, reduced_by_torch = torch._utils._rebuild_tensor_v2, _Hooks, tensor_type.__reduce_ex__
    offset_of, stride_of, storage_of = tensor_type.storage_offset, tensor_type.stride, tensor_type.untyped_storage
    class_of, nbytes_of, note = _CLASSES.get, torch.UntypedStorage.nbytes, storages.tensors.append
    key_of, add = storages.keys.get, storages.add

    def reduced(tensor: torch.Tensor) -> Any:
        nonlocal storage, reference
        known = class_of(tensor.dtype)
        is_odd = is_careful and any(is_odd(tensor) for is_odd in _ODD)
        if known is None or tensor.__dict__ or tensor._backward_hooks is not None or is_odd:
            return reduced_by_torch(tensor, 2)
        try:
            storage, shape = storage_of(tensor), tuple(tensor.shape)
        except (RuntimeError, NotImplementedError):
            # A tensor without a storage is made of other tensors.
            return reduced_by_torch(tensor, 2)
        if tensor.is_cpu:
            location = "cpu"
        elif tensor.is_cuda:
            location = storages.location(storage)
        else:
            return reduced_by_torch(tensor, 2)
        note(tensor)
        key = key_of(storage._cdata) or add(storage)
        reference = "storage", known[0], key, location, nbytes_of(storage) // known[1]
        return rebuild, (storage, offset_of(tensor), shape, stride_of(tensor), tensor.requires_grad, hooks())

    def persistent_id(value: Any) -> Any:
        # Called for every object of the state.
        nonlocal storage
        if type(value) in _NO_STORAGE:
            return None
        if value is storage:
            storage = None
            return reference
        if isinstance(value, torch.storage.TypedStorage) or torch.is_storage(value):
            return storages.reference(value)
        return None

    file = io.BytesIO()
    pickler: Any = _Pickler(file, protocol=2)
    pickler.dispatch_table = {tensor_type: reduced, **copyreg.dispatch_table, _Hooks: attrgetter("reduced")}
    pickler.persistent_id = persistent_id
    pickler.dump(state)
    if not is_careful and not storages.are_plain():
        return _pickled(state, is_careful=True)
    storages.check_dtypes()
    return file.getvalue(), storages


# ---------------------------------------------------------------------------------------- the zip file
def _row(names: str, formats: str) -> np.dtype[Any]:
    return np.dtype({"names": names.split(), "formats": formats.split()})


_HEADER = _row("mark version flags method when crc packed size name extra", "S4 <u2 <u2 <u2 <u4 <u4 <u4 <u4 <u2 <u2")
_ENTRY = _row(
    "mark made version flags method when crc packed size name extra comment disk inside outside start",
    "S4 <u2 <u2 <u2 <u2 <u4 <u4 <u4 <u4 <u2 <u2 <u2 <u2 <u2 <u4 <u4",
)
_DESCRIPTOR = _row("mark crc packed size", "S4 <u4 <u4 <u4")
_WIDE_DESCRIPTOR = struct.Struct("<4sI2Q")
_END_64, _LOCATOR, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
_NAME_IS_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8
#: The largest number of 4 bytes: it says that the number is in the extra field, in 8 bytes.
_LIMIT = (1 << 32) - 1
_MASK = (1 << 64) - 1
#: torch adds this to each checksum that it combines with those before.
_GOLDEN = 0x9E3779B9
_PICKLE, _ID = b"data.pkl", b".data/serialization_id"
#: Digits of the hash of the names, and of that of the checksums.
_ID_HALF = 20


class _Format(NamedTuple):
    """The records of a file other than the pickle, the tensors and the file's id.

    Attributes:
        prefix: Text before each record's name.
        before: The records between the pickle and the tensors.
        after: The records between the tensors and the id.
        alignment: Records begin at multiples of so many bytes.
        has_checksums: True if the directory has checksums.
    """

    prefix: bytes
    before: dict[bytes, bytes]
    after: dict[bytes, bytes]
    alignment: int
    has_checksums: bool


class _Records:
    """The zip file of a pickle and tensors.

    Attributes:
        offsets: The places of the tensors' bytes in the file, of those that have any.
        size: Bytes of the file.
    """

    def __init__(self, form: _Format, pickled: bytes, sizes: Sequence[int]) -> None:
        """Lays out the records of a pickle, and of tensors' storages of these sizes."""
        self._form = form
        self._texts = [pickled, *form.before.values()], [*form.after.values(), bytes(2 * _ID_HALF)]
        data = [b"%bdata/%d" % (form.prefix, number) for number in range(len(sizes))]
        before, after = (
            [form.prefix + name for name in names] for names in ((_PICKLE, *form.before), (*form.after, _ID))
        )
        self._names = [*before, *data, *after]
        self._sizes = np.array([*map(len, self._texts[0]), *sizes, *map(len, self._texts[1])], np.int64)
        self._lengths = np.array(list(map(len, self._names)))
        self._starts = np.zeros_like(self._sizes)
        for _ in range(2):
            # Wider headers move the records after the first one beyond the limit, and no others over it.
            self._extras = 16 * (self._sizes >= _LIMIT) + 8 * (self._starts >= _LIMIT)
            self._extras += 4 * (self._extras > 0)
            ends = self._lay_out()
            self._starts = np.append(0, ends[:-1])
        self._directory = int(ends[-1])
        self._directory_size = int((_ENTRY.itemsize + self._lengths + self._extras).sum())
        self.size = self._directory + self._directory_size + _END_64.size + _LOCATOR.size + _END.size
        self._tensors = slice(len(before), len(before) + len(sizes))
        begins = (self._starts + self._heads)[self._tensors]
        self.offsets = begins[self._sizes[self._tensors] > 0]

    def _lay_out(self) -> np.ndarray[Any, Any]:
        """Returns the end of each record; the bytes of each begin at a multiple of the alignment."""
        tails = np.where(self._extras > 0, _WIDE_DESCRIPTOR.size, _DESCRIPTOR.itemsize) * (self._sizes > 0)
        self._heads = _HEADER.itemsize + self._lengths + self._extras + 4
        before = np.append(0, (self._sizes + tails)[:-1] % self._form.alignment)
        self._paddings = -(before + self._heads) % self._form.alignment
        self._heads += self._paddings
        ends: np.ndarray[Any, Any] = np.cumsum(self._heads + self._sizes + tails)
        return ends

    def around(self) -> Segments:
        """Returns all bytes of the file but the tensors'."""
        sizes, extras, count = self._sizes, self._extras, len(self._sizes)
        texts = [*self._texts[0], *([b""] * (self._tensors.stop - self._tensors.start)), *self._texts[1]]
        crc_of = zlib.crc32 if self._form.has_checksums else lambda _: 0
        sums = list(map(crc_of, texts))
        names_hash = _names_hash(tuple(self._form.before), self._tensors.stop - self._tensors.start)
        texts[-1] = names_hash + _combined(sums[:-1], sizes.tolist())
        sums[-1] = crc_of(texts[-1])
        heads, entries, tails = np.zeros(count, _HEADER), np.zeros(count, _ENTRY), np.zeros(count, _DESCRIPTOR)
        heads["mark"], entries["mark"], tails["mark"] = b"PK\3\4", b"PK\1\2", b"PK\7\10"
        for rows in (heads, entries):
            rows["flags"], rows["name"] = _NAME_IS_UTF8 + _HAS_DESCRIPTOR * (sizes > 0), self._lengths
        heads["extra"], entries["extra"] = extras + 4 + self._paddings, extras
        for rows in (entries, tails):
            rows["packed"] = rows["size"] = np.minimum(sizes, _LIMIT)
            rows["crc"] = sums
        entries["start"] = np.minimum(self._starts, _LIMIT)
        described, wide = _rows(tails), ([b""] * count, [b""] * count)
        for number in np.flatnonzero((extras > 0) | (sizes == 0)).tolist():
            size, start = int(sizes[number]), int(self._starts[number])
            # torch leaves the packed size out of the header.
            wide[0][number], wide[1][number] = _wide(size, 0, start), _wide(size, size, start)
            described[number] = _WIDE_DESCRIPTOR.pack(b"PK\7\10", sums[number], size, size) if size else b""
        padding = [b"FB" + size.to_bytes(2, "little") + b"Z" * size for size in range(self._form.alignment)]
        paddings = [padding[size] for size in self._paddings.tolist()]
        records = zip(_rows(heads), self._names, wide[0], paddings, texts, described, strict=True)
        directory = zip(_rows(entries), self._names, wide[1], strict=True)
        data = b"".join((*chain.from_iterable(records), *chain.from_iterable(directory), self._ending()))
        # All that is no tensor's, without gaps.
        lengths = sizes[self._tensors]
        lengths = lengths[lengths > 0]
        gone = np.append(0, np.cumsum(lengths))
        cuts = np.concatenate(([0], self.offsets - gone[:-1], [len(data)]))
        return Segments(memoryview(data), np.append(0, self.offsets + lengths), cuts)

    def _ending(self) -> bytes:
        count, directory, size = len(self._names), self._directory, self._directory_size
        end_64 = _END_64.pack(b"PK\6\6", _END_64.size - 12, 0x31E, 45, 0, 0, count, count, size, directory)
        short = min(count, 0xFFFF)
        end = _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _LIMIT), min(directory, _LIMIT), 0)
        return end_64 + _LOCATOR.pack(b"PK\6\7", 0, directory + size, 1) + end


def _rows(records: np.ndarray[Any, Any]) -> list[bytes]:
    rows: list[bytes] = records.view(f"V{records.dtype.itemsize}").tolist()
    return rows


def _wide(size: int, packed: int, start: int) -> bytes:
    """Returns the extra field of numbers that need 8 bytes."""
    numbers = ([size, packed] if size >= _LIMIT else []) + ([start] if start >= _LIMIT else [])
    if not numbers:
        return b""
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _combined(sums: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns torch's combination of the checksums of all records that are not empty."""
    combined = 0
    for each, size in zip(sums, sizes, strict=False):
        if size:
            combined ^= (each + _GOLDEN + (combined << 6) + (combined >> 2)) & _MASK
    return b"%0*d" % (_ID_HALF, combined)


@functools.lru_cache(8)
def _names_hash(before: tuple[bytes, ...], count: int) -> bytes:
    """Returns torch's hash of the names of the records in a file of so many tensors."""
    writer: Any = torch._C.PyTorchFileWriter(io.BytesIO())
    for name in (_PICKLE, *before, *(b"data/%d" % number for number in range(count))):
        writer.write_record_metadata(name.decode(), 0)
    writer.write_end_of_file()
    digits: str = writer.serialization_id()
    return digits[:_ID_HALF].encode()


# ------------------------------------------------------------------------------- the release of torch
def _environment() -> tuple[Any, ...]:
    """Returns the settings that decide how ``torch.save`` writes a file."""
    tensor, module = torch.Tensor, torch.serialization
    replaced = (tensor.__reduce_ex__, tensor._reduce_ex_internal, copyreg.dispatch_table.get(tensor))
    align = getattr(module, "_get_storage_alignment", None)
    options = (int(align()) if align is not None else 64, module.get_crc32_options(), module.DEFAULT_PROTOCOL)
    return (*options, torch.save, module._save, *replaced, *module._package_registry)


@functools.lru_cache(8)
def _format(environment: tuple[Any, ...]) -> _Format:
    """Returns the format of the files of this release of torch; raises if a file planned here is not the same."""
    zeros = [torch.zeros(count, dtype=torch.float32, device="cpu") for count in (3, 0, 70, *([1] * 10))]
    state = {"weights": OrderedDict(enumerate(zeros)), "views": [zeros[2][5:], zeros[2].view(7, 10).t(), zeros[0]]}
    state["other"] = torch.nn.Parameter(torch.zeros((), dtype=torch.int64, device="cpu"), requires_grad=False)
    file = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save(state, file)
    with zipfile.ZipFile(file) as opened:
        names = opened.namelist()
    prefix = names[0].removesuffix(_PICKLE.decode())
    is_tensor = [name.startswith(f"{prefix}data/") for name in names]
    first, count = is_tensor.index(True), sum(is_tensor)
    file.seek(0)
    reader: Any = torch._C.PyTorchFileReader(file)
    others = names[1:first], names[first + count : -1]
    short = [[name.removeprefix(prefix) for name in some] for some in others]
    before, after = ({name.encode(): reader.get_record(name) for name in some} for some in short)
    form = _Format(prefix.encode(), before, after, *environment[:2])
    image = _planned(state, form)
    data = bytearray(image.size)
    image.fill(memoryview(data), threads=1)
    if data != file.getvalue():
        raise _UnplannedError("this release of torch lays out files in another way")
    return form


_ZIP = b"PK\x03\x04"
#: In the header of a record in a zip file: the place of the lengths of its name and of the next field.
_LENGTHS_AT, _HEADER_LENGTH = 26, 30
#: ``torch.load`` calls it with an open reader.
_load: Any = torch.serialization._load


def reader_of(file: Any) -> Any:
    """Returns a reader of a file of torch.save; None if torch would do more with it than unpickle ``data.pkl``."""
    with contextlib.nullcontext(file) if hasattr(file, "seek") else open(file, "rb") as opened:
        begin = opened.tell()
        is_zip = opened.read(len(_ZIP)) == _ZIP
        opened.seek(begin)
    if not is_zip:
        return None
    reader = torch._C.PyTorchFileReader(file if hasattr(file, "seek") else os.fspath(file))
    return None if "constants.pkl" in reader.get_all_records() else reader


def load(reader: Any, allowed: safe_pickle.Allowed, mapped: torch.UntypedStorage | None, map_location: Any) -> Any:
    """Returns the state in a file, by a reader of :func:`reader_of`; ``mapped`` are its bytes, if there are any.

    Raises RefusedError if the pickle is damaged, or holds something that is not allowed.
    """
    record_size = getattr(reader, "get_record_size", None)
    if record_size is None and mapped is None:
        # An older torch, which takes a storage for as large as the pickle says.
        record_size = lambda name: len(reader.get_record(name))  # noqa: E731
    # torch passes these options to the unpickler.
    options = {"allowed": allowed, "record_size": record_size}
    return _load(reader, map_location, _BY_RULES, overall_storage=mapped, **options)


def names_in(head: memoryview) -> list[str]:
    """Returns the names in a file that begins so."""
    if bytes(head[: len(_ZIP)]) != _ZIP:
        return []
    lengths = (head[at : at + 2] for at in (_LENGTHS_AT, _LENGTHS_AT + 2))
    begin = _HEADER_LENGTH + sum(int.from_bytes(length, "little") for length in lengths)
    return safe_pickle.parse(bytes(head[begin:]))[1]


class _Unpickler:
    """An unpickler for torch, which adds ``persistent_load``: that loads storages."""

    persistent_load: Any

    def __init__(self, file: Any, *, allowed: safe_pickle.Allowed, record_size: Any) -> None:
        self._data, self._allowed, self._record_size = file.read(), allowed, record_size

    def load(self) -> Any:
        storages = safe_values.storages(self.persistent_load, self._record_size)
        return safe_pickle.load(self._data, self._allowed, storages)


_BY_RULES: Any = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
