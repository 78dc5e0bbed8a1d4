"""Pickles of an attacker, and a process that loads them: composed of parts of real pickles, and of lies.

A pickle is a tree: ``("name", full)``, ``("call", what, args, steps)``, ``("new", what, args, steps)``, ``("stored", id)``,
``("dict", pairs)``, ``("list", items)``, ``("tuple", items)``, ``("set", items)``, ``("code", bytes)``, and ``("leaf", value)``.
Trees of real values are taken apart, and their parts are put in the places of others.
"""

import collections
import contextlib
import copy
import datetime as dt
import decimal
import enum
import fractions
import functools
import gc
import importlib
import io
import os
import pathlib
import pickle
import pickletools
import random
import resource
import struct
import sys
import uuid
import zipfile
from types import FunctionType

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from omegaconf import OmegaConf

from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata

#: Everything that has happened and must not.
RAN = []


class Holder:
    """A class that is only named on the way to another one."""

    def __new__(cls, *_, **__):
        RAN.append("Holder")
        return object.__new__(cls)

    class Held:
        """The class that the user named."""


class Color(enum.Enum):
    """An enumeration that the user named."""

    RED = 1


TRUST = Trust(names=(f"{__name__}.Holder.Held", f"{__name__}.Color"))
_NAMES = """
    os.system builtins.eval builtins.getattr builtins.dict builtins.list builtins.set builtins.str builtins.tuple
    builtins.frozenset builtins.bytearray builtins.int builtins.type builtins.object numpy.ndarray numpy.dtype
    numpy.float64 numpy.int64 numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar
    collections.OrderedDict collections.Counter collections.deque collections.defaultdict pathlib.PosixPath
    pathlib.PurePosixPath datetime.datetime decimal.Decimal argparse.Namespace types.SimpleNamespace
    omegaconf.dictconfig.DictConfig omegaconf.nodes.AnyNode omegaconf.listconfig.ListConfig
    omegaconf.base.ContainerMetadata typing.Any torch.Size torch.device torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_sparse_tensor torch._utils._rebuild_parameter torch._tensor._rebuild_from_type_v2
    torch.Tensor torch.nn.parameter.Parameter torch.FloatStorage torch.storage.UntypedStorage torch.float32
    torch.serialization._get_layout torch._utils._rebuild_qtensor
    torch.distributed.tensor.DTensor torch.FloatTensor copyreg._reconstructor uuid.UUID fractions.Fraction
"""
NAMES = [*_NAMES.split(), *(f"{__name__}.{name}" for name in ("Holder", "Holder.Held", "Color"))]
CONTAINERS = [
    *("builtins.dict", "builtins.list", "builtins.set", "builtins.tuple", "builtins.frozenset", "builtins.str"),
    *("collections.OrderedDict", "collections.deque", "torch.Size", "numpy.dtype"),
]
OF_METADATA = [
    *("pathlib.PosixPath", "pathlib.WindowsPath", "collections.OrderedDict", "torch.Size", "torch.float32"),
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("Metadata", "MetadataIndex", "TensorProperties")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout"),
]
ATTRIBUTES = [
    *("_str", "__class__", "__defaults__", "__dict__", "__setstate__", "append", "keys", "_content", "_parent", "data"),
    *("__doc__", "_value_", "__reduce_ex__", "_metadata", "dtype", "shape", "x", "__module__", "_backward_hooks"),
]
INTS = [-1, 0, 1, 2, 3, 7, 255, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), True]
LEAVES = [
    *(None, "O", "i8", "f8,O", "V16", "|", "<", "x", "0", "cpu", "latin1", "${witness:1}"),
    *(b"b", b"A" * 8, b"A" * 16, 0.5),
]
#: Programs of nothing but size and depth, in little memory.
PROGRAMS = {
    "deep key": b"}" + b")" + b"\x85" * 300_000 + b"Ns.",
    "shared key": b"}" + b")r\0\0\0\0" + b"h\0h\0\x86r\0\0\0\0" * 40 + b"Ns.",
    "shared element": b"(" + b")r\0\0\0\0" + b"h\0h\0\x86r\0\0\0\0" * 40 + b"\x91.",
    "memo": b"Nr\xff\xff\xff\x7f0]" + b"h\0" + b"a.",
    "deep": b"]r\0\0\0\0" + b"]" * 300_000 + b"a" * 300_000 + b".",
    "marks": b"(" * 300_000 + b"N" + b"t" * 300_000 + b".",
    "long": b"\x8a\xff" + b"\xff" * 10,
    "huge": b"\x8e" + b"\xff" * 8 + b"x.",
    "steps": b"cargparse\nNamespace\n)\x81" + b"}b" * 300_000 + b".",
    "extension": b"\x82\x01.",
    "nothing": b"",
}


# -------------------------------------------------------------------------------------- real pickles
def values():
    """Returns values of every kind, of which trees are made."""
    w = torch.arange(6.0).reshape(2, 3)
    attributes = w.clone()
    attributes.mark = 1
    scales = torch.ones(2), torch.zeros(2, dtype=torch.long)
    return [
        *({"w": w, "t": w.t(), "again": w}, torch.nn.Parameter(w.clone()), attributes, torch.empty(2, device="meta")),
        *(torch.ones(3, dtype=torch.uint16), torch.ones(2, dtype=torch.complex64).conj(), w.to_sparse()),
        *(w.to_sparse_csr(), torch.quantize_per_tensor(w, 0.1, 3, torch.qint8)),
        torch.quantize_per_channel(w, *scales, 0, torch.qint8),
        *(np.arange(6.0).reshape(2, 3), np.array(["a"]), np.array([None, "x"], dtype=object), np.float64(1.5)),
        *(np.zeros(2, dtype="i8,i8"), np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,))]), np.dtype(">f4")),
        *(np.array(["2020-01-01"], dtype="M8[D]"), np.asfortranarray(np.eye(2))),
        *(OmegaConf.create({"a": "${witness:1}"}), OmegaConf.create([1, "${witness:1}"])),
        *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.defaultdict(list, {1: [2]})),
        *(collections.deque([1, 2], 3), {1, 2}, frozenset({3}), bytearray(b"x"), 2j, range(3), slice(1, 2)),
        *(pathlib.Path("/a/b"), dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(3), dt.time(1)),
        *(decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5), 1 << 300, b"bytes"),
        *(Holder.Held(), Color.RED, [torch.float32, torch.device("cpu"), torch.strided, torch.Size([2])]),
    ]


def trees(folder):
    """Trees of a checkpoint's pickle, and of ``.metadata``."""
    found = []
    for value in values():
        file = io.BytesIO()
        torch.save(value, file)
        with zipfile.ZipFile(file) as opened:
            records = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
        data = records.pop("data.pkl")
        found.append((tree_of(data), records))
        if b"V16" in data:
            # A dtype described by text, as a forger would.
            found.append((tree_of(data.replace(b"X\x03\x00\x00\x00V16", b"X\x05\x00\x00\x00i8,i8")), records))
    dcp.save({"a": torch.zeros(4, 3), "b": {"c": torch.ones(2), "d": 5}}, checkpoint_id=folder, no_dist=True)
    return found, (tree_of(pickle.dumps(pickle.loads((pathlib.Path(folder) / ".metadata").read_bytes()), 2)), {})


def tree_of(data):
    """Returns the tree of a pickle of protocol 2."""
    stack, marks, memo = [], [], {}

    def above():
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    def pairs(items):
        return list(zip(items[::2], items[1::2], strict=True))

    for code, argument, _ in pickletools.genops(data):
        match code.name:
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(["name", argument.replace(" ", ".")])
            case "REDUCE" | "NEWOBJ":
                args = stack.pop()
                stack[-1] = ["call" if code.name == "REDUCE" else "new", stack[-1], args, []]
            case "BUILD":
                state = stack.pop()
                stack[-1][3].append(["build", state])
            case "BINPERSID":
                stack[-1] = ["stored", stack[-1]]
            case "TUPLE":
                stack.append(["tuple", above()])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(code.name[-1])
                stack[-count:] = [["tuple", stack[-count:]]]
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([code.name[6:].lower(), []])
            case "APPEND" | "APPENDS":
                items = [stack.pop()] if code.name == "APPEND" else above()
                stack[-1][1].extend(items) if stack[-1][0] == "list" else stack[-1][3].append(["append", items])
            case "SETITEM" | "SETITEMS":
                items = [stack.pop(), stack.pop()][::-1] if code.name == "SETITEM" else above()
                stack[-1][1].extend(pairs(items)) if stack[-1][0] == "dict" else stack[-1][3].append(["set", items])
            case "PROTO" | "STOP":
                pass
            case "NEWTRUE" | "NEWFALSE":
                stack.append(["leaf", code.name == "NEWTRUE"])
            case _:
                stack.append(["leaf", argument])
    return stack.pop()


# ------------------------------------------------------------------------------------------- writing
def pickled(tree):
    """Returns the pickle of a tree. A part that a tree holds twice is written once."""
    out, numbers, open_ones = [b"\x80\x02"], {}, set()
    _write(tree, out, numbers, open_ones)
    return b"".join((*out, b"."))


def _write(node, out, numbers, open_ones):
    if id(node) in numbers:
        out.append(b"j" + struct.pack("<I", numbers[id(node)]))
        return
    if id(node) in open_ones or len(open_ones) > 200:
        out.append(b"N")
        return
    open_ones.add(id(node))
    write = functools.partial(_write, out=out, numbers=numbers, open_ones=open_ones)
    kind, *parts = node
    steps = []
    if kind == "leaf":
        out.append(pickletools.optimize(pickle.dumps(parts[0], 3))[2:-1])
    elif kind == "name":
        module, _, name = parts[0].rpartition(".")
        out.append(f"c{module}\n{name}\n".encode())
    elif kind == "code":
        out.append(parts[0])
    elif kind == "stored":
        write(parts[0])
        out.append(b"Q")
    elif kind in ("call", "new"):
        write(parts[0])
        write(parts[1])
        out.append(b"R" if kind == "call" else b"\x81")
        steps = parts[2]
    elif kind == "tuple":
        out.append(b"(")
        for each in parts[0]:
            write(each)
        out.append(b"t")
    else:
        out.append({"list": b"]", "dict": b"}", "set": b"\x8f"}[kind])
    numbers[id(node)] = len(numbers)
    out.append(b"r" + struct.pack("<I", numbers[id(node)]))
    if kind in ("list", "set"):
        steps = [["append" if kind == "list" else "add", parts[0]]]
    elif kind == "dict":
        steps = [["set", [each for pair in parts[0] for each in pair]]]
    for step, content in steps:
        if step == "build":
            write(content)
            out.append(b"b")
        else:
            out.append(b"(")
            for each in content:
                write(each)
            out.append({"append": b"e", "set": b"u", "add": b"\x90"}[step])
    open_ones.discard(id(node))


# ------------------------------------------------------------------------------------------ changing
def parts_of(tree):
    """Returns all nodes of a tree, each once."""
    found, todo = {}, [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, list | tuple):
            if isinstance(node, list) and node and isinstance(node[0], str) and id(node) not in found:
                found[id(node)] = node
            elif id(node) in found:
                continue
            todo.extend(node)
    return [node for node in found.values() if node[0] not in ("build", "append", "set", "add")]


def changed(tree, pool, dice, names):
    """Returns a tree with some lies in it."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        nodes = parts_of(tree)
        calls = [node for node in nodes if node[0] in ("call", "new")] or nodes
        dtypes = [node for node in nodes if node[0] == "call" and node[1] == ["name", "numpy.dtype"]]
        node = dice.choice(dice.choice((nodes, calls)))
        before, other = list(node), copy.deepcopy(dice.choice(pool))
        name, container = ["name", dice.choice(names)], ["name", dice.choice(CONTAINERS)]
        leaf = ["leaf", dice.choice([*LEAVES, *INTS])]
        state = ["dict", [(["leaf", dice.choice(ATTRIBUTES)], dice.choice((other, name, leaf)))]]
        slots = ["tuple", [dice.choice((["leaf", None], state)), state]]
        target = dice.choice((name, name, before, other))
        match dice.randrange(12):
            case 0:
                node[:] = dice.choice((other, name, leaf))
            case 1 | 2:
                node[:] = leaf
            case 3 | 4:
                node[:] = ["call", container, ["tuple", [before]], []]
            case 5:
                node[:] = ["call", name, ["tuple", [before, other][: dice.randrange(3)]], []]
            case 6:
                node[:] = ["new", name, ["tuple", [other][: dice.randrange(2)]], [["build", state]]]
            case 7:
                _and_then(node, target, ["build", dice.choice((state, slots, slots, other, leaf))])
            case 8:
                _and_then(node, target, [dice.choice(("append", "set", "add")), [leaf, other]])
            case 9 if before[0] in ("call", "new") and before[3]:
                node[3].append(copy.deepcopy(dice.choice(before[3])))
            case 9:
                node[:] = ["dict", [(dice.choice((before, other, name)), leaf)]]
            case 10:
                args = ["tuple", [copy.deepcopy(dice.choice(pool)), leaf, leaf][: dice.randrange(4)]]
                make, cls = ["name", dice.choice(names)], ["name", dice.choice(names)]
                rebuild = ["name", "torch._tensor._rebuild_from_type_v2"]
                node[:] = ["call", rebuild, ["tuple", [make, cls, args, state]], []]
            case 11 if dtypes:
                # This object compares as equal to a dtype, and is none.
                dice.choice(dtypes)[:] = ["name", f"numpy.{dice.choice(('int64', 'float64'))}"]
            case _:
                code = dice.choice(
                    (b"\x82\x01", b"ios\nsystem\n", b"\x83\x01\x00", b"h\x00", b"2", b"0N", b"Nr\xff\xff\xff\x7f")
                )
                node[:] = ["code", code]
    return tree


def _and_then(node, target, step):
    """Puts a step on anything, also on what is no call."""
    if target[0] in ("call", "new"):
        node[:] = target
        node[3].append(step)
        return
    # A call that returns its argument does not exist: the step is written by hand.
    out = []
    _write(target, out, {}, set())
    if step[0] == "build":
        _write(step[1], out, {}, set())
        out.append(b"b")
    else:
        out.append(b"(")
        for each in step[1]:
            _write(each, out, {}, set())
        out.append({"append": b"e", "set": b"u", "add": b"\x90"}[step[0]])
    # Its memo is its own.
    node[:] = ["code", b"".join(each for each in out if not (each[:1] == b"r" and len(each) == 5))]


# ------------------------------------------------------------------------------------------- looking
def watched():
    """Returns classes, functions and modules that a load may name."""
    found = {}
    for full in {*NAMES, *OF_METADATA}:
        module, _, name = full.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):
            owner = Holder if module.endswith(".Holder") else importlib.import_module(module)
            what = getattr(owner, name)
            found.update((id(each), each) for each in (owner, *(what.__mro__ if isinstance(what, type) else (what,))))
    return list(found.values())


def world(things):
    """Returns all of this process that a load could change."""
    found = {str(each): _shown(each) for each in things}
    files = sorted(
        os.readlink(each)
        for each in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
        if os.path.exists(each)
    )
    found["process"] = (dict(os.environ), os.getcwd(), files, gc.isenabled(), torch.get_default_dtype(), np.geterr())
    found["random"] = (random.getstate(), torch.get_rng_state().tolist(), sys.getrecursionlimit())
    found["resolvers"] = sorted(OmegaConf._resolvers) if hasattr(OmegaConf, "_resolvers") else None
    found["members"], found["ran"] = vars(Color.RED).copy(), tuple(RAN)
    return found


def _shown(what):
    if isinstance(what, FunctionType):
        return what.__defaults__, what.__kwdefaults__, dict(what.__dict__), what.__code__
    # Caches that fill themselves are no change.
    left_out = ("__warningregistry__", "__annotations__", "__abstractmethods__", "_abc_impl", "__doc__", "__dict__")
    return {name: id(each) for name, each in list(getattr(what, "__dict__", {}).items()) if name not in left_out}


def touch(value, depth=0):
    """Looks at all of a value: memory that is not its own would end the process."""
    if depth > 20:
        return
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(Exception):
            value.detach().to_dense().sum().item() if value.layout != torch.strided else repr(value)
            float(value.detach().double().sum())
    elif isinstance(value, np.ndarray | np.generic):
        with contextlib.suppress(Exception):
            repr(value)
            value.tolist()
            [value[name].tolist() for name in value.dtype.names or ()]
    elif type(value) in (list, tuple, set, frozenset, collections.deque):
        for each in list(value):
            touch(each, depth + 1)
    elif isinstance(value, dict):
        for each in list(value.values()):
            touch(each, depth + 1)
    elif not type(value).__module__.startswith("omegaconf"):
        with contextlib.suppress(Exception):
            repr(value)


def zip_with(pickled_data, records):
    """Returns a file of torch.save with another pickle."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    for name, data in {"data.pkl": pickled_data, **records}.items():
        if name not in ("version", ".data/serialization_id"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    file.seek(0)
    return file


def file_of(held):
    """Returns a file of torch.save."""
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    return file


def load(data, records):
    """Loads a pickle; returns whether it was one."""
    try:
        if not records:
            parse_metadata(data, tier="durable", where="x")
        else:
            value = TRUST.load(zip_with(data, records), map_location="cpu")
            ran = len(RAN)
            touch(value)
            del RAN[ran:]
    except Exception:
        return False
    return True


def same(left, right, pairs):
    """Returns True if two values are the same in kind, content, and in which parts are one object."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | dict | tuple | set | collections.deque | torch.Tensor) or hasattr(left, "__dict__"):
        if id(left) in pairs:
            return pairs[id(left)][0] is right
        pairs[id(left)] = (right, left)
    if isinstance(left, torch.Tensor):
        return same_tensors(left, right)
    if isinstance(left, np.ndarray | np.generic):
        facts = [(each.dtype, each.shape, each.flags.f_contiguous, each.tolist()) for each in (left, right)]
        return repr(facts[0]) == repr(facts[1])
    if isinstance(left, dict):
        items = zip(left.items(), right.items(), strict=True)
        is_same = len(left) == len(right) and all(same(a, b, pairs) for a, b in items)
        return is_same and same(getattr(left, "__dict__", None), getattr(right, "__dict__", None), pairs)
    if isinstance(left, list | tuple | collections.deque):
        return len(left) == len(right) and all(same(a, b, pairs) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.storage.TypedStorage):
        return left.tolist() == right.tolist()
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return same(vars(left), vars(right), pairs)
    return left == right or (left != left and right != right)


def same_tensors(left, right):
    facts = []
    for each in (left, right):
        plain = each.detach()
        if each.is_nested:
            content = [part.tolist() for part in plain.unbind()]
        elif each.device.type == "meta":
            content = None
        elif each.layout != torch.strided:
            content = (str(each.layout), plain.to_dense().tolist())
        elif each.is_quantized:
            content = (plain.int_repr().tolist(), plain.dequantize().tolist(), plain.stride())
        else:
            content = (plain.resolve_conj().tolist(), plain.stride(), plain.storage_offset(), plain.is_conj())
        facts.append((each.dtype, each.requires_grad, content, sorted(getattr(each, "__dict__", {}))))
    return repr(facts[0]) == repr(facts[1])


def main(first, count, folder):
    """Loads some pickles; prints each before, and what has changed after."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    for name, program in PROGRAMS.items():
        print(f"program {name}", flush=True)
        for records in ({}, {"byteorder": b"little"}):
            load(b"\x80\x02" + program, records)
    OmegaConf.register_new_resolver("witness", lambda *_: RAN.append("resolver"))
    found, metadata = trees(folder)
    pool = [node for tree, _ in (*found, metadata) for node in parts_of(tree)]
    refused = [tree for tree, records in (*found, metadata) if not load(pickled(tree), records)]
    print(f"as they are: {len(found) + 1 - len(refused)} loaded, {len(refused)} refused", flush=True)
    things = watched()
    before, loaded = world(things), 0
    for seed in range(first, first + count):
        dice = random.Random(seed)
        is_metadata = dice.random() < 0.25
        tree, records = metadata if is_metadata else dice.choice(found)
        data = pickled(changed(tree, pool, dice, OF_METADATA if is_metadata else NAMES))
        print(f"seed {seed}", flush=True)
        loaded += load(data, records)
        after = world(things)
        if after != before:
            names = [name for name in after if after[name] != before[name]] + list(after["ran"][len(before["ran"]) :])
            print(f"CHANGED seed {seed}: {names}", flush=True)
            before = after
    print(f"loaded {loaded} of {count}", flush=True)


if __name__ == "__main__":
    from support import hostile

    hostile.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
