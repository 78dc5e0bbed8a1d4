"""Loading runs no code of a file: four attacks, a fuzzer of them, and real values that load as pickle loads them."""

import argparse
import collections
import datetime as dt
import fractions
import io
import os
import pathlib
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from support import hostile
from support.hostile import file_of, same
from support.supporting import build

import tiered_checkpoint_io
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Forged:
    """Pickled as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def refusal(file, *names):
    with pytest.raises(RestoreError) as caught:
        Trust(names=names).read(file, "it", {}, map_location="cpu")
    return str(caught.value)


# ------------------------------------------------------------------------------------------- attacks
def test_a_dtype_that_lies_about_its_memory_is_refused():
    state = (3, "|", None, ("f0", "f1"), {"f0": (np.int64, 0), "f1": (np.int64, 8)}, 16, 1, 16)
    lie = Forged(np.dtype, ("i8,i8",), state)
    array = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), lie, False, b"A" * 16))
    assert "a numpy dtype is not as it is saved" in refusal(file_of(Forged(*array)))


def test_what_is_only_named_is_never_called():
    rebuild, memory = torch._tensor._rebuild_from_type_v2, ((1,), "O", b"A" * 8)
    state = (1, (1,), np.dtype("i8"), False, b"A" * 8)
    assert "not allowed" in refusal(file_of(Forged(rebuild, (np.ndarray, np.ndarray, memory, state))))
    before = list(hostile.RAN)
    for made in (hostile.Holder, torch.Tensor):
        forged = file_of(Forged(rebuild, (hostile.Holder, made, (), {})))
        refusal(forged, f"{hostile.__name__}.Holder.Held")
    assert before == hostile.RAN


@pytest.mark.parametrize(
    "call",
    [
        (eval, ("1 + 1",)),
        (getattr, (collections.OrderedDict, "fromkeys")),
        (np.ndarray, ((1,), "O", b"12345678")),
        (np.dtype, ("O",), (3, "|", None, None, None, 8, 8, 0)),
        (np.dtype, ("f8",), (3, "|", None, None, None, 800, 1, 0)),
        (collections.defaultdict, (), (None, {"__missing__": print})),
        (torch.Tensor.new_zeros, (torch.ones(1), 3)),
    ],
    ids=["eval", "getattr", "memory as objects", "objects as memory", "greater elements", "print", "method"],
)
def test_forgeries_are_refused_also_by_who_allows_such_names(call):
    assert "could not" not in refusal(file_of(Forged(*call)))
    assert "torch.load refused it" in refusal(file_of(Forged(*call)), "builtins.eval", "builtins.getattr")


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "intact: Unsupported global: builtins.eval is not allowed"),
        (b"cargparse\nNamespace\nN}X\x05\x00\x00\x00aliasK\x05s\x86b.", "changes argparse.Namespace"),
        (b"cargparse\nNamespace\n)\x81)R.", "calls a result of argparse.Namespace"),
        (b"cnumpy\nndarray\n)R.", "calls numpy.ndarray"),
        (b"]cargparse\nNamespace\nK\x01a.", "changes argparse.Namespace"),
        (b"\x82\x01.", "operation that torch.save does not write"),
        (b"(iargparse\nNamespace\n.", "operation that torch.save does not write"),
    ],
    ids=["call", "a class's state", "calling a value", "memory", "appending to a class", "extension", "instance"],
)
def test_operations_are_refused_on_what_is_no_value_and_the_whole_reason_is_given(pickled, said):
    assert said in refusal(hostile.zip_with(b"\x80\x02" + pickled, {"byteorder": b"little", "data/0": bytes(16)}))
    assert not hasattr(argparse.Namespace, "alias")
    assert Trust.reason(pickle.UnpicklingError("first\nsecond")) == "first second"


@pytest.mark.parametrize("name", ["pathlib\nPosixPath", "torch.serialization\n_get_layout", "pathlib\nWindowsPath"])
def test_the_state_of_a_class_is_never_set(name):
    pickled = f"\x80\x02c{name}\nN}}X\x04\0\0\0_strX\x05\0\0\0/evils\x86b.".encode("latin-1")
    for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        before = dict(vars(kind))
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(pickled, tier="durable", where="x")
        refusal(hostile.zip_with(pickled, {}))
        assert dict(vars(kind)) == before


@pytest.fixture
def resolved():
    """Yields all that a resolver was called for."""
    calls = []
    OmegaConf.register_new_resolver("witness", lambda *given: calls.append(given) or 1, replace=True)
    yield calls
    OmegaConf.clear_resolver("witness")


class Dropping(dcp.DefaultSavePlanner):
    """Puts a call before an object, and drops its result: pickle carries it out all the same."""

    def transform_object(self, write_item, what):
        file = super().transform_object(write_item, what)
        with zipfile.ZipFile(file) as opened:
            records = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
        data = records.pop("data.pkl")
        call = pickletools.optimize(pickle.dumps(Forged(dict, (what.config,)), 2))
        return hostile.zip_with(call[:-1] + b"0" + data[2:], records)


def test_no_interpolation_is_resolved_by_a_load(resolved, tmp_path, memory_dir):
    config, several = OmegaConf.create({"a": "${witness:1}"}), OmegaConf.create(["${witness:2}"])
    loaded = Trust().load(file_of({"c": config, "l": several}), map_location="cpu")
    assert resolved == []
    assert OmegaConf.to_container(loaded["c"], resolve=False) == {"a": "${witness:1}"}
    pairs = collections.OrderedDict
    for call in (dict, list, set, tuple, frozenset, pairs, collections.Counter, collections.deque, torch.Size, str):
        refusal(file_of(Forged(call, (config,))))
        refusal(file_of(Forged(call, (several,))))
    for held in ({config: 1}, {(1, config): 2}, {config}, frozenset([config])):
        assert "a DictConfig is not allowed as a key" in refusal(file_of(held))
    refusal(file_of(Forged(torch._utils._rebuild_tensor_v2, (config, 0, (1,), (1,), False, pairs()))))
    unit = (4, "<", None, None, None, -1, -1, 0, several)
    refusal(file_of(Forged(np.dtype, ("M8",), unit)))
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread"}
    held = {"held": argparse.Namespace(config=config)}
    build(ours.save, held, checkpoint_id="step_1", planner=Dropping(), on_save_error="raise", **options)
    state = {"held": None}
    build(ours.load, state, **options).close()
    assert resolved == []
    assert state["held"].config.a == 1


def view(size=(4,), strides=(1,), offset=0, hooks=None, *bits):
    """Returns a call that makes a view of four numbers."""
    hooks = collections.OrderedDict() if hooks is None else hooks
    storage = torch.arange(4.0)._typed_storage()
    return Forged(torch._utils._rebuild_tensor_v2, (storage, offset, size, strides, False, hooks, *bits))


def whole(*numbers):
    return torch.tensor(numbers)


LIES = {
    "size": lambda: view(size=(5,)),
    "negative size": lambda: view(size=(-1,)),
    "stride": lambda: view(strides=(2,)),
    "negative stride": lambda: view(strides=(-1,)),
    "offset": lambda: view(offset=1),
    "negative offset": lambda: view(offset=-1),
    "overflow": lambda: view((1 << 62, 8), (0, 0)),
    "hooks": lambda: view(hooks=collections.OrderedDict({1: 2})),
    "conjugate": lambda: view((4,), (1,), 0, None, {"conj": True}),
    "sparse": lambda: Forged(
        torch._utils._rebuild_sparse_tensor,
        (torch.sparse_coo, (whole([0, 9]), torch.ones(2), torch.Size([4]), False)),
    ),
    "coalesced": lambda: Forged(
        torch._utils._rebuild_sparse_tensor,
        (torch.sparse_coo, (whole([1, 1]), torch.ones(2), torch.Size([4]), True)),
    ),
    "rows": lambda: Forged(
        torch._utils._rebuild_sparse_tensor,
        (torch.sparse_csr, (whole(0, 1, 9), whole(0, 1), torch.ones(2), torch.Size([2, 2]))),
    ),
    "nested": lambda: Forged(
        torch._utils._rebuild_nested_tensor, (torch.ones(4), whole([2], [3]), whole([1], [1]), whole(0, 2))
    ),
    "jagged": lambda: Forged(
        torch.nested._internal.nested_tensor._rebuild_njt,
        ({"values": torch.ones(4, 2), "offsets": whole(0, 2, 9), "lengths": None, "_ragged_idx": 1},),
    ),
    "axis": lambda: Forged(
        torch._utils._rebuild_qtensor,
        (
            torch.zeros(4, dtype=torch.int8).view(torch.int8)._typed_storage(),
            *(0, (4,), (1,), (torch.per_channel_affine, torch.ones(4), whole(0, 0, 0, 0), 7), False),
            collections.OrderedDict(),
        ),
    ),
    "attribute": lambda: Forged(
        torch._tensor._rebuild_from_type_v2,
        (torch._utils._rebuild_tensor_v2, torch.Tensor, view().call[1], {"data": torch.ones(2)}),
    ),
    "day": lambda: Forged(dt.date, (b"\x07\xe4\x01\xff",)),
    "digits": lambda: Forged(fractions.Fraction, ("1e999999999",)),
    "elements": lambda: Forged(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (3,), np.dtype("f8"), False, b"A" * 16)
    ),
    "objects": lambda: Forged(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (2,), np.dtype("O"), False, b"A" * 16)
    ),
    "list": lambda: Forged(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (3,), np.dtype("O"), False, [1])
    ),
    "member": lambda: Forged(hostile.Color, (1,), {"_value_": 5}),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_about_a_value_is_refused(kind):
    # Storages that can grow, as those on a GPU: torch would let a view grow them.
    place = {"map_location": lambda storage, _: storage.clone()}
    with pytest.raises(RestoreError) as caught:
        Trust(names=(f"{hostile.__name__}.Color",)).read(file_of([LIES[kind]()]), "it", {}, **place)
    said = str(caught.value)
    assert "torch.load refused it, whose bytes are intact: " in said
    assert "Unsupported global" not in said
    assert hostile.Color.RED.value == 1


@pytest.mark.parametrize(
    ("count", "key"), [(3, "0"), (5, "0"), (-1, "0"), (2**62, "0"), (4, "../0"), (4, "7"), (True, "0")]
)
def test_a_storage_has_to_fill_its_record(count, key):
    class Pickler(pickle.Pickler):
        def persistent_id(self, what):
            return ("storage", torch.FloatStorage, key, "cpu", count) if what is here else None

    here, out = object(), io.BytesIO()
    call = (here, 0, (1,), (1,), False, collections.OrderedDict())
    Pickler(out, 2).dump(Forged(torch._utils._rebuild_tensor_v2, call))
    refusal(hostile.zip_with(out.getvalue(), {"data/0": bytes(16), "byteorder": b"little"}))


# -------------------------------------------------------------------------------------------- fuzzer
def environment():
    paths = (Path(tiered_checkpoint_io.__file__).parents[1], Path(hostile.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), *(pytest.param(n, 10_000, marks=pytest.mark.matrix) for n in (1_000, 20_000))]
)
def test_no_composed_pickle_changes_the_process_or_ends_it(first, count, tmp_path):
    """In a child: the unpickler in C does not survive the first of its programs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", hostile.__name__, str(first), str(count), str(tmp_path / "dcp")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, (said[-1:], done.stderr)
    assert [line.removeprefix("program ") for line in said if line.startswith("program ")] == list(hostile.PROGRAMS)
    assert not [line for line in said if line.startswith("CHANGED")]
    loaded = int(said[-1].split()[1])
    assert 0.05 * count < loaded < 0.9 * count, "some of them are valid"


# -------------------------------------------------------------------------------------------- oracle


def shapes():
    """Structures whose parts refer to each other."""
    shared, cyclic, ring = [1], [], {}
    cyclic.append(cyclic)
    ring["self"], ring["list"] = ring, [ring]
    weight = torch.arange(6.0)
    named = argparse.Namespace(a=shared)
    named.own = named
    ordered = collections.OrderedDict(a=shared)
    ordered["own"], ordered._metadata = ordered, {"version": 1}
    factory = collections.defaultdict(list, {"a": shared})
    factory["own"] = factory
    held = hostile.Holder.Held()
    held.own, held.shared = held, shared
    return {
        "shared": [shared, shared, (shared, shared), {"k": shared}],
        "cyclic": [cyclic, ring],
        "tied": {"a": weight, "b": weight, "view": weight[2:], "column": weight.reshape(2, 3)[:, 1]},
        "storage": [torch.ones(2).untyped_storage(), torch.ones(2).storage()],
        "objects": [named, ordered, factory, held, shared],
        "keys": {
            (1, ("a", 2)): 1,
            frozenset({(1, 2)}): 2,
            np.int64(3): 3,
            pathlib.Path("/a"): 4,
            torch.float32: 5,
            None: 6,
        },
        "numbers": [1 << 70, -(1 << 70), -1, 255, 256, 65536, float("nan"), -0.0, float("inf"), True, "ü\ud800", ""],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_value_loads_as_pickle_itself_loads_it(protocol):
    for held in (*hostile.values(), *shapes().values()):
        file = io.BytesIO()
        torch.save(held, file, pickle_protocol=protocol)
        file.seek(0)
        oracle = torch.load(file, weights_only=False)
        file.seek(0)
        loaded = hostile.TRUST.load(file, map_location="cpu")
        assert same(loaded, oracle, {}), (loaded, oracle)


def test_metadata_loads_as_pickle_itself_loads_it(tmp_path):
    state = {"a": torch.zeros(4, 3), "b": {"c": torch.ones(2, dtype=torch.bfloat16), "d": 5, "e": [torch.ones(1), {}]}}
    dcp.save(state, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    oracle = pickle.loads(data)
    loaded = parse_metadata(data, tier="durable", where="x")
    assert loaded == oracle
    assert same(loaded, oracle, {})
