"""Pickles of an attacker, and a process that loads them: real values, pickled with lies at some places of them."""

import collections
import contextlib
import datetime as dt
import decimal
import enum
import fractions
import gc
import importlib
import io
import os
import pathlib
import pickle
import random
import resource
import sys
import uuid
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
import torch.nested
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
    torch.serialization._get_layout torch._utils._rebuild_qtensor torch._utils._rebuild_nested_tensor
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
    *(b"b", b"A" * 8, b"A" * 16, 0.5, "i8,i8"),
]
#: Operations that torch.save does not write, or not so.
CODES = [b"\x82\x01", b"ios\nsystem\n", b"\x83\x01\x00", b"h\x00", b"2", b"0N", b"Nr\xff\xff\xff\x7f"]
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
        *(torch.quantize_per_channel(w, *scales, 0, torch.qint8), torch.nested.nested_tensor([w[0], w[0, :2]])),
        torch.nested.nested_tensor([w, w[:1]], layout=torch.jagged),
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


# ------------------------------------------------------------------------------------------- lying
class Raw(bytes):
    """Operations of a pickle, written as they are."""


def named(full):
    """Returns the operation that pushes what has a name, whether or not there is such a thing."""
    module, _, name = full.rpartition(".")
    return Raw(f"c{module}\n{name}\n".encode())


class Liar(pickle._Pickler):
    """Pickles what it is given; at the places in ``lies``, counted in order, it has these write instead."""

    lies, seen = {}, []

    def save(self, what, save_persistent_id=True):
        if isinstance(what, Raw):
            self.write(what)
            return
        self.seen.append(what)
        lie = self.lies.pop(len(self.seen) - 1, None)
        if lie is not None:
            for each in lie(what):
                self.save(each)
            return
        super().save(what, save_persistent_id)


def pickled(value, lies=()):
    """Returns a file of torch.save, or the bytes of ``.metadata``; and all parts of the value, in order."""
    Liar.lies, Liar.seen = dict(lies), []
    file = io.BytesIO()
    if isinstance(value, dcp.metadata.Metadata):
        Liar(file, 2).dump(value)
        return file.getvalue(), Liar.seen
    torch.save(value, file, SimpleNamespace(Pickler=Liar, __name__="liar"), 2)
    file.seek(0)
    return file, Liar.seen


def tupled(*items):
    return Raw(b"("), *items, Raw(b"t")


def lie_about(dice, pool, names):
    """Returns a function from a part of a value to what is written in its place."""
    other, name, made, cls = dice.choice(pool), *(named(dice.choice(names)) for _ in range(3))
    container, leaf = named(dice.choice(CONTAINERS)), dice.choice([*LEAVES, *INTS])
    state = {dice.choice(ATTRIBUTES): dice.choice((other, name, leaf))}
    slots = (dice.choice((None, state)), state)
    call, build, count, draw = Raw(b"R"), Raw(b"b"), dice.randrange(4), dice.choice((1, *range(12)))

    def write(what):
        target = (name, name, what, other)[count]
        match draw:
            case 0:
                return [(other, name, leaf, leaf)[count]]
            case 1 if type(what) is int:
                return [dice.choice(INTS)]
            case 1:
                return [leaf]
            case 2 | 3:
                return [container, *tupled(what), call]
            case 4:
                return [name, *tupled(*(what, other)[:count]), call]
            case 5:
                return [name, *tupled(*(other,)[: count % 2]), Raw(b"\x81"), state, build]
            case 6:
                return [target, dice.choice((state, slots, slots, other, leaf)), build]
            case 7:
                return [target, Raw(b"("), leaf, other, Raw(dice.choice((b"e", b"u", b"\x90")))]
            case 8:
                return [Raw(b"}"), (what, other, name, name)[count], leaf, Raw(b"s")]
            case 9:
                rebuild = named("torch._tensor._rebuild_from_type_v2")
                return [rebuild, *tupled(made, cls, *tupled(*(other, leaf, leaf)[:count]), state), call]
            case 10:
                return [Raw(dice.choice(CODES))]
        # Its state twice, or none.
        return [what, *((reduced[2], build) if len(reduced := what.__reduce_ex__(2)) > 2 else ())]

    return write


def changed(value, pool, dice, names):
    """Returns the pickle of a value with some lies in it."""
    parts = pickled(value)[1]
    calls = [place for place, what in enumerate(parts) if type(what) not in (str, int, float, bool, tuple, dict, list)]
    lies = {
        dice.choice(dice.choice((range(len(parts)), calls or range(1)))): lie_about(dice, pool, names)
        for _ in range(dice.choice((1, 1, 1, 2, 3)))
    }
    dtypes = [place for place, what in enumerate(parts) if isinstance(what, np.dtype)]
    if dtypes and dice.random() < 0.1:
        # This object compares as equal to a dtype, and is none.
        lies[dice.choice(dtypes)] = lambda _: [named("numpy.int64")]
    return pickled(value, lies)[0]


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


def load(source):
    """Loads a file of torch.save, or the bytes of ``.metadata``; returns whether it was one."""
    try:
        if isinstance(source, bytes):
            parse_metadata(source, tier="durable", where="x")
        else:
            value = TRUST.load(source, map_location="cpu")
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
        load(b"\x80\x02" + program)
        load(zip_with(b"\x80\x02" + program, {"byteorder": b"little"}))
    OmegaConf.register_new_resolver("witness", lambda *_: RAN.append("resolver"))
    dcp.save({"a": torch.zeros(4, 3), "b": {"c": torch.ones(2), "d": 5}}, checkpoint_id=folder, no_dist=True)
    found, metadata = values(), pickle.loads((pathlib.Path(folder) / ".metadata").read_bytes())
    pool = [part for value in (*values(), metadata) for part in pickled(value)[1]]
    things = watched()
    before, loaded = world(things), 0
    for seed in range(first, first + count):
        dice = random.Random(seed)
        is_metadata = dice.random() < 0.25
        value = metadata if is_metadata else dice.choice(found)
        print(f"seed {seed}", flush=True)
        # Some can't be written: a part that holds itself, for one.
        with contextlib.suppress(Exception):
            loaded += load(changed(value, pool, dice, OF_METADATA if is_metadata else NAMES))
        after = world(things)
        if after != before:
            names = [name for name in after if after[name] != before[name]] + list(after["ran"][len(before["ran"]) :])
            print(f"CHANGED seed {seed}: {names}", flush=True)
            before = after
    print(f"loaded {loaded} of {count}", flush=True)


if __name__ == "__main__":
    from support import hostile

    hostile.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
