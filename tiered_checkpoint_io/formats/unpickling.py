"""The pickle inside of a checkpoint, read by an unpickler that looks up, calls and fills only what is allowed.

As torch's own for ``weights_only=True``, whose list it takes over. It also knows what checkpoints ordinarily hold
(:mod:`.plain`); names that the user allows may be nested classes and subclasses of containers; and :func:`names_in`
gives all names of a pickle at once, without looking up any of them.
"""

from __future__ import annotations

import _compat_pickle
import copyreg
import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch import _weights_only_unpickler

from tiered_checkpoint_io.formats.plain import NOT_CALLED, plain, setter

_by_torch: Any = _weights_only_unpickler

#: What no list allows: it can do anything. The first four are torch's.
_BLOCKED = ("sys", "os", "posix", "nt", "subprocess", "importlib", "runpy", "pty", "ctypes", "pickle", "_pickle")
_BLOCKED_BUILTINS = ("__import__", "breakpoint", "compile", "eval", "exec", "getattr", "input", "open", "setattr")
_GETATTR = "builtins.getattr"
_DTYPE = "numpy.dtype"
#: Kinds whose state is never set, whatever was called to get them.
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
_CONTAINERS = frozenset({dict, list, set})


class NotAllowedError(pickle.UnpicklingError):
    """A pickle names, or does, what is not allowed."""


class Allowed:
    """What a pickle may name: what torch allows, what is plain, and what the user names."""

    def __init__(self, named: Mapping[str, Any], owners: Mapping[str, Any]) -> None:
        """Takes the user's, by name, and the classes that hold those that are nested: they are named on the way."""
        self._named = {**{_full_name(each): each for each in named.values()}, **named}
        self._owners = {**{_full_name(each): each for each in owners.values()}, **owners}
        known: dict[str, Any] = {**_by_torch._get_allowed_globals(), **_by_torch._get_user_allowed_globals()}
        # torch looks at what these make once more, which only its own unpickler arranges; nothing writes them.
        self._of_torch = {name: each for name, each in known.items() if not name.startswith("torch.sparse.")}
        self._users = {id(each) for each in self._named.values()}
        self._called = self._users | {id(each) for each in self._of_torch.values()}
        self._not_called = NOT_CALLED | {id(each) for each in self._owners.values()}

    def find(self, name: str) -> Any:
        """What a dotted name means; None where it is not allowed."""
        if is_blocked(name):
            return None
        for known in (self._named, self._of_torch):
            if name in known:
                return known[name]
        found = plain(name)
        return self._owners.get(name) if found is None else found

    def is_named(self, what: Any) -> bool:
        """Whether the user named it."""
        return id(what) in self._users

    def may_call(self, found: Any) -> bool:
        """Whether what :meth:`find` found may be called, and not just named."""
        return id(found) in self._called or id(found) not in self._not_called

    def lacks(self, names: Names) -> list[str]:
        """Those names of a pickle that are not allowed, sorted."""
        # A dtype with fields is more than what is plain: by its state it could lie about its memory.
        fields = names.has_fields and _DTYPE not in self._named
        return sorted({name for name in names.found if self.find(name) is None} | ({_DTYPE} if fields else set()))


def is_blocked(name: str) -> bool:
    """Whether a dotted name is of what no list can allow."""
    module, _, rest = name.partition(".")
    return module in _BLOCKED or (module == "builtins" and rest in _BLOCKED_BUILTINS)


def pickle_module(allowed: Allowed) -> ModuleType:
    """What ``torch.load`` takes as ``pickle_module``, beside ``weights_only=False``."""

    class Unpickler(_Unpickler):
        rules = allowed

    def load(file: Any, **options: Any) -> Any:
        return Unpickler(file, **options).load()

    return cast("ModuleType", SimpleNamespace(__name__=__name__, Unpickler=Unpickler, load=load))


# ------------------------------------------------------------------------------------------- reading
_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):  # type: ignore[misc]
    """pickle's own, the one in Python, with a check before each operation that looks up, calls, or fills."""

    rules: Allowed

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        #: What was looked up and may be called, by identity.
        self._found: dict[int, Any] = {}
        #: Kinds of things that may be filled: they were looked up, or what the user named made them.
        self._kinds: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        full = _modern(module, name)
        return self._attribute if full == _GETATTR else self._look_up(full)

    def _look_up(self, full: str) -> Any:
        found = self.rules.find(full)
        if found is None:
            raise NotAllowedError(f"Unsupported global: {full} is not allowed")
        if self.rules.may_call(found):
            self._found[id(found)] = found
            if isinstance(found, type):
                self._kinds.add(found)
        return found

    def _attribute(self, owner: Any, name: str) -> Any:
        """In place of ``getattr``, by which nested classes, members of enumerations, and methods are pickled."""
        if not isinstance(owner, type):
            self._look_up(f"{_full_name(type(owner))}.{name}")
            return getattr(owner, name)
        members: Mapping[str, Any] = getattr(owner, "__members__", {}) if id(owner) in self._found else {}
        return members[name] if name in members else self._look_up(f"{_full_name(owner)}.{name}")

    def _call(self, what: Any, arguments: Any, options: Mapping[str, Any], *, new: bool) -> Any:
        is_getattr = getattr(what, "__func__", None) is _Unpickler._attribute
        if id(what) not in self._found and not (is_getattr and not new):
            raise NotAllowedError(f"it calls {_shown(what)}, which is not allowed")
        if new and what is not torch.nn.Parameter:
            made = what.__new__(what, *arguments, **options)
        else:
            made = what(*arguments, **options)
        if self.rules.is_named(what) and not isinstance(made, _CODE):
            self._kinds.add(type(made))
        return made

    def _check_fills(self, target: Any) -> None:
        if type(target) not in self._kinds and type(target) not in _CONTAINERS:
            raise NotAllowedError(f"it changes a {_shown(type(target))}, which is not allowed")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments, {}, new=False)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments, {}, new=True)

    def load_newobj_ex(self) -> None:
        options, arguments = self.stack.pop(), self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments, options, new=True)

    def load_build(self) -> None:
        target, state = self.stack[-2], self.stack[-1]
        if type(target) is torch.Tensor:
            # As torch does: the method of that name sets more.
            self.stack.pop()
            target.set_(*state)
        elif type(target) is torch.nn.Parameter or type(target) in self._kinds:
            super().load_build()
        else:
            sets = setter(target)
            if sets is None:
                raise NotAllowedError(f"it sets the state of a {_shown(type(target))}, which is not allowed")
            self.stack.pop()
            sets(target, state)

    def load_append(self) -> None:
        self._check_fills(self.stack[-2])
        super().load_append()

    def load_setitem(self) -> None:
        self._check_fills(self.stack[-3])
        super().load_setitem()

    # What these change lies below the mark.
    def load_appends(self) -> None:
        self._check_fills(self.metastack[-1][-1])
        super().load_appends()

    def load_setitems(self) -> None:
        self._check_fills(self.metastack[-1][-1])
        super().load_setitems()

    def load_additems(self) -> None:
        self._check_fills(self.metastack[-1][-1])
        super().load_additems()

    def load_refused(self) -> None:
        raise NotAllowedError("it holds an operation that torch.save does not write")


_Unpickler.dispatch = {
    **_Unpickler.dispatch,
    pickle.REDUCE[0]: _Unpickler.load_reduce,
    pickle.NEWOBJ[0]: _Unpickler.load_newobj,
    pickle.NEWOBJ_EX[0]: _Unpickler.load_newobj_ex,
    pickle.BUILD[0]: _Unpickler.load_build,
    pickle.APPEND[0]: _Unpickler.load_append,
    pickle.APPENDS[0]: _Unpickler.load_appends,
    pickle.SETITEM[0]: _Unpickler.load_setitem,
    pickle.SETITEMS[0]: _Unpickler.load_setitems,
    pickle.ADDITEMS[0]: _Unpickler.load_additems,
    **dict.fromkeys(
        (code[0] for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)), _Unpickler.load_refused
    ),
}


# --------------------------------------------------------------------------------------------- names
class Names:
    """All that a pickle names. Nothing is looked up, and nothing of what it names is called."""

    def __init__(self) -> None:
        self._made: dict[str, bool] = {}
        self._owners: set[str] = set()
        #: Whether it holds a numpy dtype with fields.
        self.has_fields = False

    @property
    def found(self) -> set[str]:
        """Dotted names; a class that is named just for another one inside of it is left out."""
        return {name for name, made in self._made.items() if made or name not in self._owners}

    def kind(self, full: str) -> type:
        """A stand-in for what a name means: anything can be done with it, and nothing follows from that."""
        self._made.setdefault(full, False)
        names = self

        class Thing(_Thing):
            def __new__(cls, *_: Any, **__: Any) -> Any:
                names._made[full] = True
                return object.__new__(cls)

            def __setstate__(self, state: Any) -> None:
                names.has_fields |= full == _DTYPE and isinstance(state, tuple) and any(state[2:5])

        Thing.full = full
        return Thing

    def attribute(self, owner: Any, name: str) -> type:
        """In place of ``getattr``."""
        self._owners.add(owner.full)
        return self.kind(f"{owner.full}.{name}")


class _Thing:
    full = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _ignored(self, *_: Any) -> None:
        pass

    append = extend = add = update = __setitem__ = _ignored


def names_in(pickled: BinaryIO) -> Names:
    """What a pickle names, at the speed of the unpickler in C.

    Raises:
        Exception: It is no pickle, or damaged.
    """
    names = Names()
    _outlined(pickled, names)
    return names


def outline(pickled: bytes) -> Any:
    """What a pickle holds, with stand-ins for tensors and all else that it names: dictionaries, numbers and text stay.

    Raises:
        Exception: It is no pickle, or damaged.
    """
    return _outlined(io.BytesIO(pickled), Names())


def _outlined(pickled: BinaryIO, names: Names) -> Any:
    # What was registered for a number is put in its place without a look-up.
    if copyreg._extension_cache:  # type: ignore[attr-defined]
        raise pickle.UnpicklingError("this process has extensions for pickle")

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            full = _modern(module, name)
            return names.attribute if full == _GETATTR else names.kind(full)

        def persistent_load(self, pid: Any) -> None:
            """A tensor's storage."""

    return Unpickler(pickled, encoding="utf-8").load()


def _modern(module: str, name: str) -> str:
    """The dotted name that a pickle means, which may be in Python 2's terms."""
    known = _compat_pickle.NAME_MAPPING.get((module, name))
    module, name = known or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
    return f"{module}.{name}"


def _full_name(what: Any) -> str:
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', '')}"


def _shown(what: Any) -> str:
    return _full_name(what if hasattr(what, "__qualname__") else type(what))
