"""Reads pickles of unknown origin: a parser that makes data, then converters that make values.

:func:`parse` looks up no name, calls no function and changes no object. It returns numbers, text and containers, with a
:class:`Call`, :class:`Name` or :class:`Stored` for each thing that the pickle asks for. :class:`Converter` makes the
values: by a rule that checks plain arguments, or by a class that the user named.

The loop is written in Python because the unpickler in C is no match for a hostile file: nested tuples as a key end the
process, a large memo index fills its memory. Calls back into Python would cost it more than this loop takes.
"""

from __future__ import annotations

import _compat_pickle
import enum
import importlib
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

from tiered_checkpoint_io.formats.parallel import collecting_later

_GETATTR = "builtins.getattr"
#: Elements of a tuple that is a key. Python hashes tuples by recursion, without a limit.
_MOST_IN_KEY = 10_000
#: Elements of a value that is taken apart, each as often as it is referred to.
_MOST_ELEMENTS = 10_000_000
#: Names of other releases, and their present names.
_RENAMED = {
    "numpy.core.": "numpy._core.",
    "pathlib._local.": "pathlib.",
    "lightning_fabric.": "lightning.fabric.",
    "pytorch_lightning.": "lightning.pytorch.",
    "torch.tensor.": "torch._tensor.",
}
LEAVES = frozenset({int, float, str, bytes, bool, type(None), complex, bytearray})


class RefusedError(pickle.UnpicklingError):
    """A pickle is damaged, or asks for something that is not allowed.

    Attributes:
        names: All names of the pickle that are not allowed.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class Name:
    """A name that a pickle looks up. Only :class:`Converter` looks it up."""

    __slots__ = ("full", "is_called", "is_owner")

    def __init__(self, full: str) -> None:
        self.full = full
        self.is_called = self.is_owner = False


class Call:
    """A call that a pickle asks for, and the steps that fill its result.

    Attributes:
        name: Name of the callable; of an attribute, after the name of the owner's class.
        args: Arguments as the parser made them.
        kind: ``call``, ``new`` or ``attribute``.
        options: Keyword arguments, or None.
        steps: ``(kind, content)`` of each step: ``build``, ``append``, ``set`` or ``add``.
        value: Result of the conversion.
    """

    __slots__ = ("args", "kind", "name", "options", "steps", "value")

    def __init__(self, name: str, args: tuple[Any, ...], kind: str = "call", options: Any = None) -> None:
        self.name = name
        self.args = args
        self.kind = kind
        self.options = options
        self.steps: Sequence[tuple[str, Any]] = ()
        self.value: Any = _NOT_MADE


class Stored:
    """A storage that a pickle refers to by its persistent id."""

    __slots__ = ("id",)

    def __init__(self, persistent_id: Any) -> None:
        self.id = persistent_id


class _Mark:
    """A state of a conversion."""


_NOT_MADE, _BEING_MADE = _Mark(), _Mark()


# ------------------------------------------------------------------------------------------- parsing
def parse(data: bytes) -> tuple[Any, list[str]]:
    """Returns the content of a pickle as data, and all names in it except those that only hold another one.

    Raises RefusedError if it is damaged, or does something that no pickle of a checkpoint does.
    """
    parser = _Parser(data)
    try:
        with collecting_later():
            root = parser.run()
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"the pickle is damaged: {type(error).__name__}: {error}") from error
    return root, [each.full for each in parser.names if each.is_called or not each.is_owner]


class _Parser:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self.names: list[Name] = []

    def run(self) -> Any:
        """Carries out all operations, the most frequent ones first."""
        data, stack, memo, position = self._data, self.stack, self._memo, 0
        push, operations = stack.append, _OPERATIONS
        while True:
            code = data[position]
            position += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x72:  # LONG_BINPUT
                memo[_uint4(data, position)[0]] = stack[-1]
                position += 4
            elif code == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif code == 0x68:  # BINGET
                push(memo[data[position]])
                position += 1
            elif code == 0x6A:  # LONG_BINGET
                push(memo[_uint4(data, position)[0]])
                position += 4
            elif code in operations:
                operations[code](self)
            elif code in _CONSTANTS:
                push(_CONSTANTS[code])
            elif code in _SIZED:
                width, make = _SIZED[code]
                begin = position + width
                position = begin + int.from_bytes(data[position:begin], "little")
                if position > len(data):
                    raise RefusedError("the pickle is cut off")
                push(make(data[begin:position]))
            elif code in _FIXED:
                width, make = _FIXED[code]
                push(make(data[position : position + width]))
                position += width
            elif code == 0x71:  # BINPUT
                memo[data[position]] = stack[-1]
                position += 1
            elif code in _IGNORED:
                position += _IGNORED[code]
            elif code == 0x63:  # GLOBAL
                position = self._global(position)
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                raise RefusedError(f"it holds an operation that torch.save does not write: {bytes([code])!r}")

    def pop(self, count: int) -> list[Any]:
        """Takes the topmost things from the stack."""
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[Any]:
        """Takes all above the last mark from the stack."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _global(self, position: int) -> int:
        middle = self._data.index(b"\n", position)
        end = self._data.index(b"\n", middle + 1)
        self._named(self._data[position:middle].decode(), self._data[middle + 1 : end].decode())
        return end + 1

    def _named(self, module: Any, name: Any) -> None:
        if type(name) is not str or type(module) is not str:
            raise RefusedError("a name in it is no text")
        known = _compat_pickle.NAME_MAPPING.get((module, name))
        module, name = known or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        found = Name(_current(f"{module}.{name}"))
        if found.full != _GETATTR:
            self.names.append(found)
        self.stack.append(found)

    def _called(self, what: Any, args: Any, kind: str, options: Any) -> Any:
        if type(what) is not Name or type(args) is not tuple or type(options) not in (dict, type(None)):
            raise RefusedError(f"it calls {_shown(what)}, which is not allowed")
        if what.full == _GETATTR and kind == "call":
            return self._attribute(*args)
        what.is_called = True
        return Call(what.full, args, kind, options)

    def _attribute(self, owner: Any, name: Any) -> Name | Call:
        """Reads a call of ``getattr``: so pickle writes nested classes, members of enumerations, and methods."""
        if type(owner) not in (Name, Call) or type(name) is not str:
            raise RefusedError(f"it asks for an attribute of {_shown(owner)}, which is not allowed")
        found = Name(f"{owner.full if type(owner) is Name else owner.name}.{name}")
        self.names.append(found)
        if type(owner) is Call:
            return Call(found.full, (owner, name), "attribute")
        owner.is_owner = True
        return found

    def _call(self, kind: str, options: Any = None) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args, kind, options)

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        else:
            self._step("append", items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            raise RefusedError("a key in it has no value")
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[key if type(key) is str else checked_key(key)] = value
        else:
            self._step("set", items)

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is set:
            target.update(map(checked_key, items))
        else:
            self._step("add", items)

    def _step(self, kind: str, content: Any) -> None:
        target = self.stack[-1]
        if type(target) is not Call:
            raise RefusedError(f"it changes {_shown(target)}, which is not allowed")
        if not isinstance(target.steps, list):
            target.steps = []
        target.steps.append((kind, content))


def checked_key(key: Any) -> Any:
    """Returns a key whose hash takes a bounded time and depth: Python hashes nested tuples by recursion."""
    if type(key) in (tuple, frozenset):
        list(_elements(key, tuple, frozenset, most=_MOST_IN_KEY))
    return key


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_uint4 = struct.Struct("<I").unpack_from
#: Operations with a length: its width, and the maker of the value.
_SIZED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    pickle.BINUNICODE[0]: (4, _text),
    pickle.SHORT_BINUNICODE[0]: (1, _text),
    pickle.BINUNICODE8[0]: (8, _text),
    pickle.BINSTRING[0]: (4, _text),
    pickle.SHORT_BINSTRING[0]: (1, _text),
    pickle.BINBYTES[0]: (4, bytes),
    pickle.SHORT_BINBYTES[0]: (1, bytes),
    pickle.BINBYTES8[0]: (8, bytes),
    pickle.BYTEARRAY8[0]: (8, bytearray),
    pickle.LONG1[0]: (1, _signed),
    pickle.LONG4[0]: (4, _signed),
}
#: Operations of a fixed width: the same.
_FIXED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    pickle.BINFLOAT[0]: (8, lambda data: struct.unpack(">d", data)[0]),
    pickle.BININT[0]: (4, _signed),
    pickle.BININT2[0]: (2, lambda data: int.from_bytes(data, "little")),
}
_CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
#: Operations without an effect: width of their arguments.
_IGNORED = {pickle.PROTO[0]: 1, pickle.FRAME[0]: 8}
_OPERATIONS: dict[int, Callable[[_Parser], Any]] = {
    pickle.MARK[0]: lambda parser: parser.marks.append(len(parser.stack)),
    pickle.REDUCE[0]: lambda parser: parser._call("call"),
    pickle.NEWOBJ[0]: lambda parser: parser._call("new"),
    pickle.NEWOBJ_EX[0]: lambda parser: parser._call("new", parser.stack.pop()),
    pickle.BUILD[0]: lambda parser: parser._step("build", parser.stack.pop()),
    pickle.APPEND[0]: lambda parser: parser._append(parser.pop(1)),
    pickle.APPENDS[0]: lambda parser: parser._append(parser.pop_mark()),
    pickle.SETITEM[0]: lambda parser: parser._set(parser.pop(2)),
    pickle.SETITEMS[0]: lambda parser: parser._set(parser.pop_mark()),
    pickle.ADDITEMS[0]: lambda parser: parser._add(parser.pop_mark()),
    pickle.TUPLE[0]: lambda parser: parser.stack.append(tuple(parser.pop_mark())),
    pickle.TUPLE1[0]: lambda parser: parser.stack.append((parser.stack.pop(),)),
    pickle.TUPLE2[0]: lambda parser: parser.stack.append(tuple(parser.pop(2))),
    pickle.TUPLE3[0]: lambda parser: parser.stack.append(tuple(parser.pop(3))),
    pickle.EMPTY_DICT[0]: lambda parser: parser.stack.append({}),
    pickle.EMPTY_LIST[0]: lambda parser: parser.stack.append([]),
    pickle.EMPTY_SET[0]: lambda parser: parser.stack.append(set()),
    pickle.FROZENSET[0]: lambda parser: parser.stack.append(frozenset(map(checked_key, parser.pop_mark()))),
    pickle.BINPERSID[0]: lambda parser: parser.stack.append(Stored(parser.stack.pop())),
    pickle.STACK_GLOBAL[0]: lambda parser: parser._named(*parser.pop(2)),
    pickle.POP[0]: lambda parser: parser.stack.pop(),
    pickle.POP_MARK[0]: lambda parser: parser.pop_mark(),
}


def _current(full: str) -> str:
    for old, new in _RENAMED.items():
        if full.startswith(old):
            return new + full.removeprefix(old)
    return full


def _shown(what: Any) -> str:
    if type(what) is Name:
        return what.full
    return f"a result of {what.name}" if type(what) is Call else f"a {type(what).__name__}"


# ---------------------------------------------------------------------------------------- converting
class Allowed:
    """All that a kind of pickle may hold besides data.

    Attributes:
        rules: Makers of values, by the name of the callable.
        value: Function from a name that is not called to its value; None if it has none.
        named: Classes and functions that the user named.
        is_key: Function that is true for further values that may be keys, besides objects of the user's classes.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        value: Callable[[str], Any],
        is_key: Callable[[Any], bool],
        named: Mapping[str, Any] | None = None,
    ) -> None:
        self.rules = rules
        self.is_key = is_key
        self.named = {_current(name): each for name, each in (named or {}).items()}
        self._value = value

    def value(self, name: str) -> Any:
        """Returns the value of a name; None if the name is not allowed."""
        if name in self.named:
            return self.named[name]
        owner, _, member = name.rpartition(".")
        members: Mapping[str, Any] = getattr(self.named.get(owner), "__members__", {})
        return members[member] if member in members else self._value(name)

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Returns those names that are not allowed, sorted."""
        return sorted({name for name in names if name not in self.rules and self.value(name) is None})


def _elements(value: Any, *containers: type, most: int = _MOST_ELEMENTS) -> Iterator[Any]:
    """Yields the parts of a value that are neither numbers nor text nor one of some containers."""
    todo = [value]
    for each in todo:
        if type(each) in containers:
            todo.extend((*each, *each.values()) if type(each) is dict else each)
            if len(todo) > most:
                raise RefusedError("a value in it is too large")
        elif type(each) not in LEAVES:
            yield each


class Converter:
    """Makes values of a result of :func:`parse`. Containers are filled in place, so that references stay references."""

    def __init__(self, allowed: Allowed, load_storage: Callable[[Any], Any]) -> None:
        self.allowed = allowed
        self._load_storage = load_storage
        #: Converted objects, by the id of the parser's object; both are kept, so that no id is used again.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._users = {each for each in allowed.named.values() if isinstance(each, type)}

    def __call__(self, raw: Any) -> Any:
        """Returns the value."""
        kind = type(raw)
        if kind in LEAVES:
            return raw
        if kind is Call:
            return raw.value if type(raw.value) is not _Mark else self._call(raw)
        if kind is Stored:
            return self._load_storage(raw.id)
        known = self._done.get(id(raw))
        if known is not None:
            if type(known[1]) is _Mark:
                raise RefusedError("a tuple in it holds itself")
            return known[1]
        if kind is list:
            self._done[id(raw)] = (raw, raw)
            for position, each in enumerate(raw):
                if type(each) not in LEAVES:
                    raw[position] = self(each)
            return raw
        if kind is dict:
            self._done[id(raw)] = (raw, raw)
            if {*map(type, raw)} <= {str}:
                for key, each in raw.items():
                    if type(each) not in LEAVES:
                        raw[key] = self(each)
            else:
                items = list(raw.items())
                raw.clear()
                for key, each in items:
                    raw[self.key(key)] = self(each)
            return raw
        self._done[id(raw)] = (raw, raw if kind is set else _BEING_MADE)
        made = self._rare(raw, kind)
        self._done[id(raw)] = (raw, made)
        return made

    def _rare(self, raw: Any, kind: type) -> Any:
        if kind is tuple:
            made = tuple([each if type(each) in LEAVES else self(each) for each in raw])
            return made if any(new is not old for new, old in zip(made, raw, strict=True)) else raw
        if kind is set:
            items = list(raw)
            raw.clear()
            raw.update([self.key(each) for each in items])
            return raw
        if kind is frozenset:
            return frozenset([self.key(each) for each in raw])
        if kind is Name:
            found = self.allowed.value(raw.full)
            if found is None:
                raise RefusedError(f"{raw.full} is not allowed there")
            return found
        raise RefusedError(f"a {kind.__name__} is not allowed there")

    def key(self, raw: Any) -> Any:
        """Returns the value of a key, see :meth:`checked`."""
        return raw if type(raw) in LEAVES else self.checked(self(raw))

    def checked(self, value: Any) -> Any:
        """Returns a value that may be a key: neither its hash nor its comparison runs code that was not named."""
        for each in _elements(checked_key(value), tuple, frozenset):
            if not (self.allowed.is_key(each) or type(each) in self._users):
                raise RefusedError(f"a {type(each).__name__} is not allowed as a key")
        return value

    def passive(self, raw: Any) -> Any:
        """Returns a value that runs no code when it is taken apart: a container of OmegaConf would resolve itself."""
        value = self(raw)
        for each in _elements(value, tuple, list, dict, set):
            is_torch = type(each).__module__.partition(".")[0] == "torch"
            if not (is_torch or self.allowed.is_key(each)):
                raise RefusedError(f"a {type(each).__name__} is not allowed there")
        return value

    def _call(self, call: Call) -> Any:
        if call.value is _BEING_MADE:
            raise RefusedError(f"the arguments of {call.name} refer to its result")
        call.value = _BEING_MADE
        rule = self.allowed.rules.get(call.name) if call.kind != "attribute" else None
        if rule is not None and call.options:
            raise RefusedError(f"it calls {call.name} with options")
        call.value = self.by_user(call) if rule is None else rule(call, self)
        return call.value

    def by_user(self, call: Call) -> Any:
        """Makes the object of a user's class or function: by the code of the user, as pickle does it."""
        what = self.allowed.named.get(call.name)
        if what is None:
            raise RefusedError(f"it calls {call.name}, which is not allowed")
        if call.kind == "attribute":
            return getattr(self(call.args[0]), call.args[1])
        if call.kind == "new" and not isinstance(what, type):
            raise RefusedError(f"it makes an object of {call.name}, which is no class")
        args, options = self(call.args) if call.args else (), self(call.options) if call.options else {}
        made = what.__new__(what, *args, **options) if call.kind == "new" else what(*args, **options)
        call.value = made
        if call.steps and isinstance(made, _NOT_FILLED):
            raise RefusedError(f"it changes a {type(made).__name__}, which is not allowed")
        for kind, content in call.steps:
            fill(made, kind, self(content))
        return made


#: Classes of objects that are not filled, although a function of the user returned them: they exist once in the
#: process, or their state has addresses of memory.
_NOT_FILLED = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, enum.Enum),
    *(np.ndarray, np.dtype, np.generic, torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage),
)
Rule = Callable[[Call, Converter], Any]


def fill(made: Any, kind: str, content: Any) -> None:
    """Carries out a step on an object, as pickle does it."""
    if kind == "append":
        made.extend(content) if hasattr(made, "extend") else [made.append(each) for each in content]
    elif kind == "set":
        for key, value in zip(content[::2], content[1::2], strict=True):
            made[key] = value
    elif kind == "add":
        for each in content:
            made.add(each)
    elif hasattr(made, "__setstate__"):
        made.__setstate__(content)
    else:
        state, slots = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
        if state:
            made.__dict__.update(state)
        for name, value in (slots or {}).items():
            setattr(made, name, value)


# -------------------------------------------------------------------------------- checks for rules
def expect(is_so: object, what: str) -> None:
    """Raises an error if something is not as it is saved."""
    if not is_so:
        raise RefusedError(f"{what} is not as it is saved")


def plain_arguments(call: Call, convert: Converter, *kinds: type) -> Any:
    """Returns the arguments of a call that has no further steps, if they are of these very types."""
    args = convert.passive(call.args)
    expect(not call.steps and all(type(each) in kinds for each in args), call.name)
    return args


def made_of(*kinds: type) -> Rule:
    """Returns the rule for a class that makes only data of any arguments of these very types."""
    return lambda call, convert: imported(call.name)(*plain_arguments(call, convert, *kinds))


def steps(call: Call, *kinds: str) -> Iterator[tuple[str, Any]]:
    """Yields the kind and content of the steps of a call, if they are of some kinds."""
    for kind, content in call.steps:
        expect(kind in kinds, call.name)
        yield kind, content


def attributes(cls: type, state: Any) -> dict[str, Any]:
    """Returns a state if it consists of attributes, and none of them hides a method."""
    halves = state if type(state) is tuple and len(state) == 2 else (state,)
    expect(all(each is None or type(each) is dict for each in halves), f"the state of {cls.__name__}")
    state = {name: each for half in halves for name, each in (half or {}).items()}
    for name in state:
        is_safe = type(name) is str and not name.startswith("__") and not callable(getattr(cls, name, None))
        expect(is_safe, f"attribute {name!r} of {cls.__name__}")
    return cast("dict[str, Any]", state)


def imported(name: str) -> Any:
    """Returns the object of a name in a table of rules; None if it is not there."""
    module, _, attribute = name.rpartition(".")
    if attribute == "WindowsPath" and os.name != "nt":
        # Other systems can't make a WindowsPath.
        attribute = "PureWindowsPath"
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def shape_of(shape: Any) -> tuple[int, ...]:
    """Returns a shape after a check."""
    expect(isinstance(shape, tuple), "a shape")
    for size in shape:
        if type(size) is not int or size < 0:
            raise RefusedError(f"{size!r} is not a size")
    return cast("tuple[int, ...]", shape)


def record(call: Call, convert: Converter) -> Any:
    """Makes an object that consists of attributes: a rule."""
    cls = imported(call.name)
    expect(isinstance(cls, type) and len(call.steps) <= 1, call.name)
    args = convert.passive(call.args)
    made = call.value = cls() if call.kind == "call" and not args else cls.__new__(cls, *args)
    for kind, content in steps(call, "build"):
        state = (convert.passive if call.name.startswith("torch.") else convert)(content)
        if type(state) is list:
            expect(all(type(each) in LEAVES for each in state), call.name)
        else:
            state = attributes(cls, state)
        fill(made, kind, state)
    return made


def _no_storage(_: Any) -> Any:
    raise RefusedError("it refers to a storage, and is no file of torch.save")


def load(data: bytes, allowed: Allowed, load_storage: Callable[[Any], Any] = _no_storage) -> Any:
    """Returns the content of a pickle; raises RefusedError if it is damaged, or holds something that is not allowed.

    ``load_storage`` loads a storage by its persistent id, as the parser made the id.
    """
    root, names = parse(data)
    lacking = allowed.lacks(names)
    if lacking:
        raise RefusedError(f"Unsupported global: {lacking[0]} is not allowed", lacking)
    try:
        with collecting_later():
            return Converter(allowed, load_storage)(root)
    except RefusedError:
        raise
    except RecursionError as error:
        raise RefusedError("it is nested too deeply") from error
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
