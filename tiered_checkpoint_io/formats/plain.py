"""What any checkpoint may hold beside tensors: classes and functions that make values, and run no other code.

Each entry stands here because what it makes holds data alone, whatever it is called with: nothing is imported, opened,
executed, or called back. Where the original would do more, a function of this module takes its place.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np

_NODES = ("Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "InterpolationResult", "Path", "String")
_SCALARS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))

#: By module. What none of the functions below stands in for is looked up there as it is.
_NAMES: dict[str, tuple[str, ...]] = {
    # Values and containers of values; ``str`` calls only the ``__str__`` of something that is allowed itself.
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set"),
        *("slice", "str", "tuple"),
    ),
    # ``defaultdict`` calls its factory, without arguments, when a key is missing: another name that is allowed.
    "collections": ("defaultdict", "deque"),
    # Text that is taken apart; no file is touched.
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    # Numbers; the only foreign code that dates know is that of a time zone, which has to be allowed itself.
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
    # Attributes and nothing else.
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    # A dictionary whose keys are attributes: Lightning's hyper-parameters.
    "lightning.fabric.utilities.data": ("AttributeDict",),
    # Enumerations of words: a lookup of a member.
    "lightning.pytorch.trainer.states": ("RunningStage", "TrainerFn", "TrainerStatus"),
    # Text.
    "torch.torch_version": ("TorchVersion",),
    # A marker.
    "typing": ("Any",),
    # Containers of nodes, nodes of values. An interpolation stays text until that key is read.
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.nodes": tuple(f"{kind}Node" for kind in _NODES),
    # Numbers and text; dtypes and arrays by the functions below.
    "numpy": (
        *("bool", "bool_", "complex128", "complex64", "datetime64", "float16", "float32", "float64", "bytes_", "str_"),
        *("timedelta64", *_SCALARS),
    ),
}

#: The same things under the names that other releases give them.
_RENAMED = {
    "numpy.core.": "numpy._core.",
    "pathlib._local.": "pathlib.",
    "lightning_fabric.": "lightning.fabric.",
    "pytorch_lightning.": "lightning.pytorch.",
}


def plain(name: str) -> Any:
    """What a dotted name of the list above means; None where it is not on it."""
    for old, new in _RENAMED.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return _plain(name)


@functools.lru_cache(maxsize=256)
def _plain(name: str) -> Any:
    if name in _STAND_INS:
        return _STAND_INS[name]
    module, _, attribute = name.rpartition(".")
    if attribute not in _NAMES.get(module, ()):
        return None
    if name == "pathlib.WindowsPath" and os.name != "nt":
        # Can't be made elsewhere.
        attribute = "PureWindowsPath"
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


# --------------------------------------------------------------------------------------------- numpy
def _dtype(description: Any, *flags: Any) -> Any:
    if not isinstance(description, str):
        raise UnpicklingError("a numpy dtype that is not described by text")
    kind: Any = np.dtype
    return kind(description, *(bool(flag) for flag in flags))


def _array(kind: Any, shape: Any, typecode: Any) -> np.ndarray[Any, Any]:
    if kind is not np.ndarray or shape != (0,) or typecode not in (b"b", "b"):
        raise UnpicklingError("a numpy array that is not made as numpy makes it")
    return np.ndarray((0,), np.int8)


def _scalar(dtype: Any, *data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not all(type(each) is bytes for each in data):
        raise UnpicklingError("a numpy scalar that is not made of bytes")
    return np.ndarray((), dtype, data[0])[()] if data else np.zeros((), dtype)[()]


def _set_dtype(dtype: Any, state: Any) -> None:
    """Sets a dtype's byte order, and the unit of a date; a state that says more could make it lie about its memory."""
    expected = dtype.__reduce__()[2]
    same = isinstance(state, tuple) and len(state) == len(expected) and state[0] == expected[0]
    same = same and state[2:8] == expected[2:8]
    if not same or state[1] not in ("<", ">", "=", "|") or not all(_is_unit(each) for each in state[8:]):
        raise UnpicklingError("a numpy dtype with fields, which is allowed only where safe_globals lists numpy.dtype")
    dtype.__setstate__(state)


def _is_unit(metadata: Any) -> bool:
    if not isinstance(metadata, tuple) or len(metadata) != 2 or metadata[0] not in ({}, None):
        return False
    kind, *numbers = metadata[1]
    return isinstance(kind, bytes) and all(type(number) is int for number in numbers)


def _set_array(array: Any, state: Any) -> None:
    _, _, dtype, _, data = state
    if not isinstance(dtype, np.dtype) or dtype.hasobject is not isinstance(data, list):
        raise UnpicklingError("a numpy array whose content is not of its dtype")
    array.__setstate__(state)


_STAND_INS: dict[str, Any] = {
    "numpy.dtype": _dtype,
    "numpy.ndarray": np.ndarray,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _scalar,
}

#: What may be looked up, and handed to one of the functions above, but not called: memory that it is given.
NOT_CALLED = frozenset({id(np.ndarray)})


def setter(made: Any) -> Callable[[Any, Any], None] | None:
    """What sets the state of a thing that one of the functions above made."""
    if type(made) is np.ndarray:
        return _set_array
    return _set_dtype if isinstance(made, np.dtype) else None
