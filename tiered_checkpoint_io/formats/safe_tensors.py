"""Tensors of a pickle of torch, made by rules that check all claims about memory.

A view has to be within its storage, a storage has to fill its record, and an index has to be within its target. Classes
of tensors are torch's below, and classes that the user named; a class that is only named is never called.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from tiered_checkpoint_io.formats.safe_pickle import (
    Call,
    Converter,
    Name,
    RefusedError,
    Rule,
    attributes,
    expect,
    imported,
    made_of,
    plain_arguments,
    record,
    shape_of,
    steps,
)

#: Classes of torch whose objects are attributes only.
_RECORDS: dict[str, tuple[str, ...]] = {
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_FlatLayout", "_MeshLayout"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    "torch._dynamo.decorators": ("_DimRange",),
}
_DTENSOR = "torch.distributed.tensor.DTensor"
_NESTED = "torch.nested._internal.nested_tensor.NestedTensor"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_MOST = 2**63 - 1


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
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        is_inside = min([*size, *stride, offset]) >= 0 and (0 in size or last < buffer.numel())
        expect(is_inside, "a nested tensor")
    make: Any = torch._utils._rebuild_nested_tensor
    return cast("torch.Tensor", make(buffer, sizes, strides, offsets))


def _jagged(call: Call, convert: Converter) -> torch.Tensor:
    (options,) = convert.passive(call.args)
    expect(type(options) is dict and not call.steps, "a jagged tensor")
    values, offsets, lengths = (options.get(name) for name in ("values", "offsets", "lengths"))
    axis, cached = options.get("_ragged_idx"), options.get("_metadata_cache")
    expect(_is_tensor(values) and _is_tensor(offsets, torch.int64, torch.int32), "a jagged tensor")
    expect(type(axis) is int and 0 < axis <= values.dim() and offsets.dim() == 1, "a jagged tensor")
    begins = offsets.tolist()
    expect(
        begins and begins[0] >= 0 and begins == sorted(begins) and begins[-1] <= values.shape[axis - 1],
        "a jagged tensor",
    )
    if lengths is not None:
        expect(_is_tensor(lengths, offsets.dtype) and lengths.shape == (len(begins) - 1,), "a jagged tensor")
        ends = [begin + length for begin, length in zip(begins, lengths.tolist(), strict=False)]
        expect(
            all(begin <= end <= values.shape[axis - 1] for begin, end in zip(begins, ends, strict=False)),
            "a jagged tensor",
        )
    expect(
        cached is None
        or (type(cached) is dict and all(type(each) is torch.Tensor or type(each) is int for each in cached.values())),
        "a jagged tensor",
    )
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
    **{f"{module}.{name}": record for module, names in _RECORDS.items() for name in names},
    **{f"{_PLACEMENTS}.{name}": _placement for name in ("Partial", "Replicate", "Shard", "_StridedShard")},
    **dict.fromkeys((_DTENSOR, _NESTED, *_STORAGES), only_named),
    "torch.Size": _size,
    "torch.device": made_of(str, int),
    "torch.serialization._get_layout": _layout,
}
