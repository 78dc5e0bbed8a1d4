"""Values that any checkpoint may hold besides plain data: each is made by a rule that checks plain arguments.

A rule gets a :class:`Call` with the parser's values, and the converter for it. Its result holds data only: for any
arguments, no code is imported or executed, and no file is opened. Rules check all that torch or numpy would not check:
a view has to be within its storage, a storage has to fill its record, and an index has to be within its target. A class
that is only named is never called.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import functools
import importlib
import math
import pathlib
import re
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, cast

import numpy as np
import torch

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.safe_pickle import (
    Allowed,
    Call,
    Converter,
    Name,
    RefusedError,
    Rule,
    attributes,
    expect,
    fill,
    imported,
    made_of,
    plain_arguments,
    record,
    shape_of,
    steps,
)

#: Modules and builtins that no list can allow: they can do anything. The first four are torch's.
_BLOCKED = ("sys", "os", "posix", "nt", "subprocess", "importlib", "runpy", "pty", "ctypes", "pickle", "_pickle")
_BLOCKED_BUILTINS = ("__import__", "breakpoint", "compile", "eval", "exec", "getattr", "input", "open", "setattr")
_NATIVE = "<" if sys.byteorder == "little" else ">"
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
#: Classes whose objects are attributes only.
_RECORDS: dict[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_FlatLayout", "_MeshLayout"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    "torch._dynamo.decorators": ("_DimRange",),
}
_DTENSOR = "torch.distributed.tensor.DTensor"
_NESTED = "torch.nested._internal.nested_tensor.NestedTensor"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_MOST = 2**63 - 1
#: Enumerations of words.
_STATES = ("RunningStage", "TrainerFn", "TrainerStatus")
_CONFIGS = (
    *("dictconfig.DictConfig", "listconfig.ListConfig", "base.ContainerMetadata", "base.Metadata", "nodes.AnyNode"),
    *("nodes.BooleanNode", "nodes.BytesNode", "nodes.EnumNode", "nodes.FloatNode", "nodes.IntegerNode"),
    *("nodes.InterpolationResultNode", "nodes.PathNode", "nodes.StringNode"),
)


# --------------------------------------------------------------------------------------------- types
@functools.lru_cache(maxsize=256)
def value(name: str) -> Any:
    """Returns the type, dtype or quantization scheme of a name; None if it is none of these.

    A type may be a factory, or that of a node: a call of it with any arguments makes only data.
    """
    module, _, attribute = name.rpartition(".")
    if name in _TYPES or RULES.get(name, only_named) is not only_named:
        found = imported(name)
        return found if isinstance(found, type) or name == "typing.Any" else None
    found = vars(torch).get(attribute) if module == "torch" else None
    return found if isinstance(found, torch.dtype | torch.qscheme) else None


# ---------------------------------------------------------------------------------- plain containers
def mapping(call: Call, convert: Converter) -> Any:
    make = imported(call.name)
    factory, pairs = (call.args[:1], call.args[1:]) if make is collections.defaultdict else ((), call.args)
    expect(all(each is None or type(each) is Name for each in factory) and len(pairs) <= 1, call.name)
    made = call.value = make(*convert(factory))
    for each in pairs:
        content = convert(each)
        items = list(content.items()) if type(content) is dict else content
        expect(type(items) is list and all(type(pair) in (tuple, list) for pair in items), call.name)
        for key, item in items:
            made[convert.checked(key)] = item
    for kind, content in steps(call, "set", "build"):
        if kind == "build":
            made.__dict__.update(attributes(type(made), convert(content)))
            continue
        for key, item in zip(content[::2], content[1::2], strict=True):
            made[convert.key(key)] = convert(item)
    return made


def _elements(call: Call, convert: Converter) -> Any:
    make = imported(call.name)
    check = convert.checked if make in (set, frozenset) else lambda each: each
    elements = [convert(each) for each in call.args]
    expect(len(elements) <= 1 and all(type(each) in (list, tuple, set) for each in elements), call.name)
    made = call.value = make([check(each) for part in elements for each in part])
    for kind, content in steps(call, "add" if make is set else "append"):
        fill(made, kind, [check(each) for each in convert(content)])
    return made


def _deque(call: Call, convert: Converter) -> Any:
    elements, longest = (*call.args, None) if len(call.args) == 1 else call.args or ((), None)
    expect(type(elements) in (tuple, list) and type(longest) in (int, type(None)), call.name)
    made = call.value = collections.deque(maxlen=longest)
    for each in (elements, *(content for _, content in steps(call, "append"))):
        made.extend(convert(each))
    return made


def _bytes(call: Call, convert: Converter) -> bytes | bytearray:
    args = plain_arguments(call, convert, bytes, str)
    expect(not args or type(args[0]) is bytes or args[1:] in (("latin1",), ("latin-1",)), call.name)
    return bytearray(*args) if call.name == "builtins.bytearray" else bytes(*args)


def _date(call: Call, convert: Converter) -> Any:
    make, args = imported(call.name), convert.passive(call.args)
    zones = args[1:] if args and type(args[0]) is bytes else args[7:] if make is dt.datetime else args[4:]
    numbers = args[: len(args) - len(zones)]
    expect(not call.steps and all(type(each) in (int, bytes) for each in numbers), call.name)
    expect(all(each is None or isinstance(each, dt.tzinfo) for each in zones), call.name)
    # An object made of bytes is not checked; objects made of that one are.
    return make(*args).replace()


def _fraction(call: Call, convert: Converter) -> fractions.Fraction:
    args = plain_arguments(call, convert, int, str)
    # An exponent could ask for any number of digits.
    expect(all(type(each) is int or re.fullmatch(r"-?\d+(/\d+)?", each) for each in args), call.name)
    return fractions.Fraction(*args)


def _uuid(call: Call, convert: Converter) -> uuid.UUID:
    (state,) = [content for _, content in steps(call, "build")]
    expect(type(state) is dict and set(state) <= {"int", "is_safe"} and type(state["int"]) is int, call.name)
    return uuid.UUID(int=state["int"], is_safe=uuid.SafeUUID(convert.passive(state.get("is_safe"))))


def _config(call: Call, convert: Converter) -> Any:
    """Makes a container or node of OmegaConf, or its metadata. An interpolation stays text until it is read."""
    cls, base = imported(call.name), importlib.import_module("omegaconf.base")
    expect(not call.args and len(call.steps) == 1, call.name)
    made = call.value = cls.__new__(cls)
    ((kind, content),) = steps(call, "build")
    state = attributes(cls, convert(content))
    described = (
        (base.ContainerMetadata,) if issubclass(cls, base.Container) else (base.Metadata, base.ContainerMetadata)
    )
    is_known = type(state.get("_metadata")) in described and isinstance(state.get("_parent"), base.Node | None)
    if issubclass(cls, base.Metadata):
        kinds = [state.get(name) for name in ("ref_type", "object_type", "key_type", "element_type")]
        is_known = all(each is None or isinstance(each, type) or type(each).__module__ == "typing" for each in kinds)
    expect(is_known, call.name)
    fill(made, kind, state)
    return made


# --------------------------------------------------------------------------------------------- numpy
def _dtype(call: Call, convert: Converter) -> np.dtype[Any]:
    text, *flags = convert.passive(call.args)
    expect(type(text) is str and re.fullmatch(r"[?biufcmMSUVO]\d*", text), "a numpy dtype")
    expect(all(type(each) in (bool, int) for each in flags) and len(call.steps) <= 1, "a numpy dtype")
    made: Any = np.dtype(text)
    for _, content in steps(call, "build"):
        version, order, base, names, fields, *memory = convert.passive(content)
        expect(version in (3, 4) and order in ("<", ">", "=", "|"), "a numpy dtype")
        if names is not None:
            made = _fields(names, fields, memory)
        elif base is not None:
            made = np.dtype((_data_dtype(base[0]), shape_of(base[1])))
        elif made.kind in "mM" and len(memory) > 3:
            made = np.dtype(f"{text}[{_unit(memory[3])}]" if _unit(memory[3]) else text)
        made = made if order in ("|", "=", _NATIVE) else made.newbyteorder(order)
        # Size, alignment and flags must be those that numpy itself finds: they are offsets into memory.
        expect(made.__reduce__()[2][5:8] == tuple(memory[:3]), "a numpy dtype")
    return cast("np.dtype[Any]", made)


def _fields(names: Any, fields: Any, memory: list[Any]) -> Any:
    expect(type(names) is tuple and type(fields) is dict and all(type(name) is str for name in names), "a numpy dtype")
    each = [fields[name] for name in names]
    size, _, flags = memory[:3]
    expect(type(size) is int and type(flags) is int and all(type(field[1]) is int for field in each), "a numpy dtype")
    described: Any = {
        "names": list(names),
        "formats": [_data_dtype(field[0]) for field in each],
        "offsets": [field[1] for field in each],
        "itemsize": size,
    }
    return np.dtype(described, align=bool(flags & 0x80))


def _data_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype that describes data, and no objects."""
    expect(isinstance(dtype, np.dtype) and not dtype.hasobject, "a numpy dtype")
    return cast("np.dtype[Any]", dtype)


def _unit(metadata: Any) -> str:
    """Returns the unit of dates as text."""
    others, (unit, count, *_) = metadata
    expect(not others and type(unit) is bytes and type(count) is int, "a numpy dtype of dates")
    return "" if unit == b"generic" else f"{count}{unit.decode()}"


def _array(call: Call, convert: Converter) -> np.ndarray[Any, Any]:
    kind, shape, typecode = call.args
    expect(type(kind) is Name and kind.full == "numpy.ndarray" and shape == (0,), "a numpy array")
    expect(convert.passive(typecode) in (b"b", "b") and len(call.steps) == 1, "a numpy array")
    ((_, state),) = steps(call, "build")
    _, shape, dtype, is_fortran, data = state
    dtype = convert.passive(dtype)
    order: Any = "F" if is_fortran is True else "C"
    if dtype == np.dtype(object) and type(data) is list:
        expect(math.prod(shape_of(shape)) == len(data), "a numpy array")
        made = np.empty(len(data), object)
        for index, each in enumerate(convert(data)):
            made[index] = each
        return made.reshape(shape).copy(order)
    return _array_of(convert(data), dtype, convert(shape), order)


def _array_of(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    dtype = _data_dtype(dtype)
    expect(type(data) in (bytes, bytearray) and order in ("C", "F"), "a numpy array")
    expect(dtype.itemsize and math.prod(shape_of(shape)) * dtype.itemsize == len(data), "a numpy array")
    return np.ndarray(shape, dtype, data, order=order).copy(order="K")


def _array_of_buffer(call: Call, convert: Converter) -> np.ndarray[Any, Any]:
    expect(not call.steps, "a numpy array")
    return _array_of(*convert.passive(call.args))


def _scalar(call: Call, convert: Converter) -> Any:
    dtype, data = convert.passive(call.args)
    expect(not call.steps, "a numpy scalar")
    return _array_of(data, dtype, (), "C")[()]


# ------------------------------------------------------------------------------------------- tensors
def storages(load: Callable[[Any], Any], record_size: Callable[[str], int] | None) -> Callable[[Any], Any]:
    """Returns a loader of storages by their persistent ids.

    ``load`` loads one by a checked id, as ``torch.load`` does. ``record_size`` returns the bytes of a record of the
    file; None if a storage can't be larger than its record.
    """
    known: dict[tuple[str, str], Any] = {}

    def stored(persistent_id: Any) -> Any:
        expect(type(persistent_id) is tuple and len(persistent_id) == 5, "the id of a storage")
        what, kind, key, location, count = persistent_id
        expect(what == "storage" and type(kind) is Name and kind.full in _STORAGES, "the id of a storage")
        expect(type(key) is str and re.fullmatch(r"\w+", key) and type(location) is str, "the id of a storage")
        expect(type(count) is int, "the id of a storage")
        if (kind.full, key) not in known:
            storage_type = _STORAGES[kind.full]
            size = count * (1 if storage_type is torch.UntypedStorage else storage_type.dtype.itemsize)
            expect(record_size is None or record_size(f"data/{key}") == size, f"the size of storage {key}")
            made = load(("storage", storage_type, key, location, count))
            expect(made._untyped_storage.nbytes() == size, f"the size of storage {key}")
            known[kind.full, key] = made
        return known[kind.full, key]

    return stored


def only_named(call: Call, _: Converter) -> Any:
    """Refuses a call of something that a rule of another may name."""
    raise RefusedError(f"it calls {call.name}, which is not allowed")


_STORAGES: dict[str, Any] = {
    f"{each.__module__}.{each.__name__}": each
    if each is torch.UntypedStorage
    else cast("Any", torch.serialization).StorageType(each.__name__)
    for each in cast("Any", torch)._storage_classes
    if each is not torch.storage.TypedStorage
}


def _typed(storage: Any) -> Any:
    expect(type(storage) is torch.storage.TypedStorage, "the storage of a tensor")
    return storage


def _check_view(storage: Any, size: Any, strides: Any, offset: Any, item: int) -> None:
    """Checks that a view is within its storage."""
    expect(isinstance(size, tuple) and isinstance(strides, tuple) and type(offset) is int, "a tensor")
    count, last = 1, offset
    for length, stride in zip(size, strides, strict=True):
        expect(type(length) is int and type(stride) is int and length >= 0 and stride >= 0, "the shape of a tensor")
        count *= length
        last += (length - 1) * stride
    is_inside = offset >= 0 and (not count or (last + 1) * item <= storage._untyped_storage.nbytes())
    expect(is_inside and count <= _MOST, "the place of a tensor in its storage")


def _hooks(raw: Any) -> Any:
    """Returns the hooks of a tensor: torch saves none, and they would be called."""
    is_none = type(raw) is Call and raw.name == "collections.OrderedDict" and not raw.args and not raw.steps
    expect(raw is None or is_none, "the hooks of a tensor")
    return OrderedDict()


def _bits(raw: Any, dtype: torch.dtype) -> Any:
    """Returns the marks of a conjugate or negative view."""
    expect(type(raw) is dict and all(type(each) is bool for each in raw.values()), "a tensor")
    expect(set(raw) <= {"conj", "neg"} and (dtype.is_complex or not raw.get("conj")), "a tensor")
    return raw


def _tensor(call: Call, convert: Converter) -> torch.Tensor:
    """Makes an ordinary tensor by version 2, or by version 3, which has a dtype and an untyped storage."""
    is_third = call.name.endswith("3")
    storage, offset, size, strides, needs_gradient, hooks, *more = call.args
    storage, size = _typed(convert(storage)), size if type(size) is tuple else convert(size)
    dtype = convert(more.pop(0)) if is_third else storage.dtype
    expect(isinstance(dtype, torch.dtype) and type(needs_gradient) is bool and not call.steps, "a tensor")
    _check_view(storage, size, strides, offset, dtype.itemsize)
    args = [storage, offset, size, strides, needs_gradient, _hooks(hooks), *((dtype,) if is_third else ())]
    if more:
        (bits,) = more
        args.append(_bits(bits, dtype))
    make: Any = torch._utils._rebuild_tensor_v3 if is_third else torch._utils._rebuild_tensor_v2
    return cast("torch.Tensor", make(*args))


def _is_tensor(each: Any, *dtypes: torch.dtype) -> bool:
    """Returns True for an ordinary tensor, of one of some dtypes."""
    is_ordinary = type(each) is torch.Tensor and each.layout is torch.strided and not each.is_quantized
    return is_ordinary and (not dtypes or each.dtype in dtypes)


def _parameter(call: Call, convert: Converter) -> torch.Tensor:
    data, needs_gradient, hooks, *state = call.args
    data = convert(data)
    expect(isinstance(data, torch.Tensor) and type(needs_gradient) is bool and not call.steps, "a parameter")
    made = call.value = torch.nn.Parameter(data, needs_gradient)
    made._backward_hooks = _hooks(hooks)
    for each in state:
        _set_attributes(made, convert(each))
    return made


def _set_attributes(tensor: torch.Tensor, state: Any) -> None:
    for name, each in attributes(type(tensor), state).items():
        expect(not hasattr(torch.Tensor, name), f"attribute {name!r} of a tensor")
        setattr(tensor, name, each)


def _quantized(call: Call, convert: Converter) -> torch.Tensor:
    storage, offset, size, strides, parameters, needs_gradient, hooks = call.args
    storage, size, strides, parameters = convert.passive((storage, size, strides, parameters))
    scheme, scale, zero, *axis = parameters
    _check_view(_typed(storage), size, strides, offset, storage.dtype.itemsize)
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        expect(type(scale) is float and type(zero) is int and not axis, "a quantized tensor")
    else:
        expect(_is_tensor(scale) and _is_tensor(zero) and type(axis[0]) is int, "a quantized tensor")
        expect(0 <= axis[0] < len(size), "a quantized tensor")
        expect(scale.shape == zero.shape == (size[axis[0]],), "a quantized tensor")
    expect(needs_gradient is False and not call.steps, "a quantized tensor")
    make: Any = torch._utils._rebuild_qtensor
    return cast("torch.Tensor", make(storage, offset, size, strides, tuple(parameters), False, _hooks(hooks)))


def _sparse(call: Call, convert: Converter) -> torch.Tensor:
    layout, data = convert.passive(call.args)
    expect(isinstance(layout, torch.layout) and type(data) is tuple and not call.steps, "a sparse tensor")
    expect(all(_is_tensor(each) for each in data[: -1 if layout is not torch.sparse_coo else 2]), "a sparse tensor")
    make: Any = torch.sparse_compressed_tensor
    if layout is not torch.sparse_coo:
        *parts, size = data
        return cast("torch.Tensor", make(*parts, shape_of(size), layout=layout, check_invariants=True))
    indices, values, size, *is_coalesced = data
    expect(all(type(each) is bool for each in is_coalesced), "a sparse tensor")
    return torch.sparse_coo_tensor(
        indices, values, shape_of(size), check_invariants=True, is_coalesced=is_coalesced[0] if is_coalesced else None
    )


def _meta(call: Call, convert: Converter) -> torch.Tensor:
    dtype, size, strides, needs_gradient = convert.passive(call.args)
    expect(isinstance(dtype, torch.dtype) and type(needs_gradient) is bool and not call.steps, "a tensor")
    size, strides = shape_of(size), shape_of(strides)
    return torch.empty_strided(size, strides, dtype=dtype, device="meta", requires_grad=needs_gradient)


def _nested(call: Call, convert: Converter) -> torch.Tensor:
    buffer, sizes, strides, offsets = convert.passive(call.args)
    whole = (torch.int64,)
    is_known = (
        _is_tensor(buffer) and buffer.dim() == 1 and all(_is_tensor(each, *whole) for each in (sizes, strides, offsets))
    )
    expect(is_known and not call.steps and sizes.shape == strides.shape, "a nested tensor")
    expect(sizes.dim() == 2 and offsets.shape == sizes.shape[:1], "a nested tensor")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        # torch refuses a view that is not within its storage.
        buffer.as_strided(size, stride, offset)
    make: Any = torch._utils._rebuild_nested_tensor
    return cast("torch.Tensor", make(buffer, sizes, strides, offsets))


def _jagged(call: Call, convert: Converter) -> torch.Tensor:
    (options,) = convert.passive(call.args)
    expect(type(options) is dict and not call.steps, "a jagged tensor")
    values, offsets, lengths = (options.get(name) for name in ("values", "offsets", "lengths"))
    axis, cached = options.get("_ragged_idx"), options.get("_metadata_cache")
    expect(_is_tensor(values) and _is_tensor(offsets, torch.int64, torch.int32), "a jagged tensor")
    expect(type(axis) is int and 0 < axis <= values.dim() and offsets.dim() == 1, "a jagged tensor")
    expect(lengths is None or _is_tensor(lengths, offsets.dtype), "a jagged tensor")
    begins, rows = offsets.tolist(), offsets.diff()
    for each in (rows, rows if lengths is None else lengths):
        for begin, length in zip(begins, [*each.tolist(), 0], strict=True):
            expect(begin >= 0, "a jagged tensor")
            # torch refuses a row that is not within the values.
            values.narrow(axis - 1, begin, length)
    cached = {} if cached is None else cached
    expect(type(cached) is dict and {*map(type, cached.values())} <= {torch.Tensor, int}, "a jagged tensor")
    return cast("torch.Tensor", imported(_NESTED)(**options))


def _wrapper(call: Call, convert: Converter) -> torch.Tensor:
    cls, dtype, size, strides, offset, layout, device, needs_gradient = call.args
    cls, (dtype, layout, device) = _tensor_class(cls, convert), convert((dtype, layout, device))
    expect(isinstance(dtype, torch.dtype) and isinstance(layout, torch.layout), "a tensor")
    expect(isinstance(device, torch.device) and type(offset) is int and type(needs_gradient) is bool, "a tensor")
    size, strides = shape_of(convert(size)), shape_of(convert(strides))
    make: Any = torch._utils._rebuild_wrapper_subclass
    return cast("torch.Tensor", make(cls, dtype, size, strides, offset, layout, device, needs_gradient))


def _tensor_class(raw: Any, convert: Converter) -> Any:
    """Returns a class of tensors: torch's own that have rules, and those that the user named."""
    name = raw.full if type(raw) is Name else ""
    cls = imported(name) if name in (_DTENSOR, _NESTED) else convert(raw)
    expect(isinstance(cls, type) and issubclass(cls, torch.Tensor), "the class of a tensor")
    return cls


def _tensor_of_class(call: Call, convert: Converter) -> torch.Tensor:
    """Makes a tensor of another class, or one with attributes."""
    make, cls, args, state = call.args
    name, cls = getattr(cls, "full", ""), _tensor_class(cls, convert)
    expect(type(make) is Name and type(args) is tuple and not call.steps, "a tensor")
    expect(make.full in _MAKERS or make.full in convert.allowed.named, "a tensor")
    made = convert(Call(make.full, args))
    expect(isinstance(made, torch.Tensor), "a tensor")
    if type(made) is not cls:
        expect(name not in (_DTENSOR, _NESTED) and type(made) is torch.Tensor, "a tensor")
        made = made.as_subclass(cls)
    call.value = made
    state = (convert.passive if name in (_DTENSOR, _NESTED) else convert)(state)
    if name == _NESTED and type(state) is dict:
        # Its constructor has set and checked the others.
        state = {key: each for key, each in state.items() if not hasattr(made, key)}
    is_of_user = name in convert.allowed.named
    state = attributes(object if is_of_user else cls, state)
    if cls.__setstate__ is not torch.Tensor.__setstate__:
        made.__setstate__(state)
    elif is_of_user:
        # A class of the user's own may have attributes of any name, such as that of a method of tensors.
        made.__dict__.update(state)
    else:
        _set_attributes(made, state)
    return cast("torch.Tensor", made)


def _size(call: Call, _: Converter) -> torch.Size:
    (sizes,) = call.args
    expect(not call.steps, "a size")
    return torch.Size(shape_of(sizes))


def _layout(call: Call, convert: Converter) -> Any:
    (name,) = plain_arguments(call, convert, str)
    return cast("Any", torch.serialization)._get_layout(name)


def _placement(call: Call, convert: Converter) -> Any:
    """Makes a placement by its constructor: as an object of C++ it must not exist without."""
    cls, state = imported(call.name), {}
    expect(len(call.steps) <= 1 and not call.args, call.name)
    for _, content in steps(call, "build"):
        state = attributes(object, convert(content))
    expect(all(type(each) in (int, str) for each in state.values()), call.name)
    return cls(**state)


_MAKERS: dict[str, Rule] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_class,
}
RULES: Mapping[str, Rule] = {
    **_MAKERS,
    **{f"{_PLACEMENTS}.{name}": _placement for name in ("Partial", "Replicate", "Shard", "_StridedShard")},
    **dict.fromkeys((_DTENSOR, _NESTED, *_STORAGES), only_named),
    "torch.Size": _size,
    "torch.device": made_of(str, int),
    "torch.serialization._get_layout": _layout,
    **{f"{module}.{name}": record for module, names in _RECORDS.items() for name in names},
    **{f"omegaconf.{name}": _config for name in _CONFIGS},
    **{f"pathlib.{name}": made_of(str) for name in _PATHS},
    **{f"lightning.pytorch.trainer.states.{name}": made_of(str) for name in _STATES},
    # May only be named: as an argument, a call may take any memory.
    "numpy.ndarray": only_named,
    "torch.torch_version.TorchVersion": made_of(str),
    "builtins.dict": mapping,
    "collections.OrderedDict": mapping,
    "collections.Counter": mapping,
    "collections.defaultdict": mapping,
    "lightning.fabric.utilities.data.AttributeDict": mapping,
    "builtins.list": _elements,
    "builtins.set": _elements,
    "builtins.frozenset": _elements,
    "builtins.tuple": _elements,
    "collections.deque": _deque,
    "_codecs.encode": _bytes,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.bool": made_of(bool),
    "builtins.int": made_of(int),
    "builtins.float": made_of(float),
    "builtins.str": made_of(str),
    "builtins.complex": made_of(float, int),
    "builtins.range": made_of(int),
    "builtins.slice": made_of(int, float, str, type(None)),
    "datetime.date": _date,
    "datetime.datetime": _date,
    "datetime.time": _date,
    "datetime.timedelta": made_of(int),
    "datetime.timezone": made_of(dt.timedelta, str),
    "decimal.Decimal": made_of(str),
    "fractions.Fraction": _fraction,
    "uuid.UUID": _uuid,
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _array_of_buffer,
}
#: Types that may be values, besides those with a rule.
_TYPES = {"typing.Any", "torch.Tensor", "torch.nn.parameter.Parameter"}
_TYPES |= {f"numpy.{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_TYPES |= {f"numpy.{name}" for name in ("bool", "bool_", "bytes_", "str_", "complex64", "complex128", "datetime64")}
_TYPES |= {f"numpy.{name}" for name in ("float16", "float32", "float64", "timedelta64")}
#: Classes of keys: neither a hash nor a comparison of theirs runs code of others.
_KEYS = (
    *(type, pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, np.generic, np.dtype),
    *(dt.date, dt.time, dt.timedelta, dt.tzinfo, Enum, range),
    *(torch.Tensor, torch.Size, torch.dtype, torch.device, torch.layout, torch.qscheme),
)


def _is_key(each: Any) -> bool:
    return isinstance(each, _KEYS) or type(each).__name__ == "_DimRange"


def is_blocked(name: str) -> bool:
    """Returns True for a name that no list can allow."""
    module, _, rest = name.partition(".")
    return module in _BLOCKED or (module == "builtins" and rest in _BLOCKED_BUILTINS)


def named(names: Iterable[str]) -> dict[str, Any]:
    """Returns the classes and functions of a list, by their names there and by their own."""
    found = {name: _found(name) for name in names}
    found = {**{_full_name(each): each for each in found.values()}, **found}
    return {name: each for name, each in found.items() if not is_blocked(name)}


def allowed(names: Iterable[str] = ()) -> Allowed:
    """Returns the values that a checkpoint may hold: these, and those that the user named here or to torch.

    Raises:
        ConfigError: A name can't be imported.
    """
    known = torch.serialization.get_safe_globals()
    by_torch = (each if isinstance(each, tuple) else (each, _full_name(each)) for each in known)
    others = {name: each for each, name in by_torch if name not in RULES and not is_blocked(name)}
    return Allowed(RULES, value, _is_key, {**others, **named(names)})


def _full_name(what: Any) -> str:
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', '')}"


def _found(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            break
        return found
    raise ConfigError(f"safe_globals names {name!r}, which can't be imported", hint="as in 'package.module.Class'")
