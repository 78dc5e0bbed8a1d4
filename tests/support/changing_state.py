"""A training's state, and the ways in which it may change between two saves."""

import gc
import sys
from collections import OrderedDict, defaultdict
from typing import Any

import torch


class Tagged(torch.Tensor):
    """A tensor subclass."""


class Box:
    """An object that says how it is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self):
        return Box, (self.value,)


class World:
    """A training's state as Lightning saves it, whose parts can be changed between saves."""

    def __init__(self, count: int = 40) -> None:
        self.model = {f"layer.{n}.weight": torch.full((n % 5 + 1, 3), float(n)) for n in range(count)}
        self.moments: dict[Any, dict[str, Any]] = {}
        self.ema: dict[str, torch.Tensor] = {}
        self.names = dict.fromkeys(range(count), 1)
        self.more: dict[str, Any] = {}
        self.step = 0

    def begin_moments(self) -> None:
        self.moments = {
            n: {"step": torch.tensor(float(self.step)), "exp_avg": torch.zeros_like(each), "exp_avg_sq": each.clone()}
            for n, each in enumerate(self.model.values())
        }

    def state(self) -> dict[str, Any]:
        weights = OrderedDict((name, each.detach()) for name, each in self.model.items())
        weights._metadata = OrderedDict((name[:-7], {"version": 1}) for name in self.model)
        groups = [{"lr": 0.1 / (self.step + 1), "params": list(range(len(self.model)))}]
        before = {key: self.more[key] for key in self.more if key.startswith("before")}
        return {
            **before,
            "epoch": self.step // 10,
            "global_step": self.step,
            "state_dict": weights,
            "loops": {"step": self.step, "device": "cpu", "storage": "0"},
            "callbacks": {
                "best": {
                    "path": f"{self.step:05}" + "p" * (self.step // 8 % 90),
                    "score": torch.tensor(self.step * 0.5),
                }
            },
            "optimizer_states": [{"state": self.moments, "param_groups": groups}],
            "ema": self.ema,
            **self.more,
        }


# ------------------------------------------------------------------------------------------ changes
def nth(world: World, seed: int) -> str:
    return list(world.model)[seed % len(world.model)]


def rename(world: World, seed: int) -> None:
    name = nth(world, seed)
    world.model = {(f"{key}_" if key == name else key): each for key, each in world.model.items()}


def reorder(world: World, seed: int) -> None:
    world.model[name] = world.model.pop(name := nth(world, seed))


def replace(make):
    def change(world: World, seed: int) -> None:
        name = nth(world, seed)
        world.model[name] = make(world.model[name].detach())

    return change


def resize(world: World, seed: int) -> None:
    world.model[nth(world, seed)].untyped_storage().resize_(4096)


def renew(world: World, seed: int) -> None:
    """The same sizes at, most likely, the same addresses, and objects of the same ids, in another order."""
    shapes = [each.shape for each in world.model.values()]
    names = list(world.model)
    world.model.clear()
    gc.collect()
    world.model = dict(zip(names, [torch.zeros(shape) for shape in reversed(shapes)], strict=True))


def alias(world: World, seed: int) -> None:
    world.model[nth(world, seed)] = world.model[nth(world, seed // 7)]


def swap(world: World, seed: int) -> None:
    """Two names for each of two tensors, and then the other way round."""
    one, two = torch.zeros(4), torch.zeros(4)
    tensors = [one, two, *((two, one) if seed % 2 else (one, two))]
    world.model |= {name: each.view(4) for name, each in zip(list(world.model)[:4], tensors, strict=True)}


def average(world: World, seed: int) -> None:
    kinds = [
        lambda: {name: each.clone() for name, each in world.model.items()},
        lambda: {f"ema.{name}": each for name, each in world.model.items()},
        lambda: {name: each[:1] if each.dim() else each for name, each in world.model.items()},
        dict,
    ]
    world.ema = kinds[seed % len(kinds)]()


def add(make):
    def change(world: World, seed: int) -> None:
        world.more[("more", "before", "more2")[seed % 3]] = make(world, seed)

    return change


def remove(world: World, seed: int) -> None:
    world.more.clear()
    if len(world.model) > 34:
        del world.model[nth(world, seed)]


def attribute(world: World, seed: int) -> None:
    world.model[nth(world, seed)].requires_grad_().mark = seed


def moment(world: World, seed: int) -> None:
    if world.moments:
        world.moments[seed % len(world.moments)]["step"] = [seed, float(seed), torch.tensor(seed)][seed % 3]


CHANGES = {
    "nothing": lambda world, seed: None,
    "step": lambda world, seed: setattr(world, "step", seed),
    "rename": rename,
    "reorder": reorder,
    "equal": replace(torch.clone),
    "bfloat16": replace(lambda each: torch.ones(each.shape, dtype=torch.bfloat16)),
    "integers": replace(lambda each: torch.ones(each.shape, dtype=torch.int32)),
    "complex": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64)),
    "conjugate": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64).conj()),
    "negative": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64).conj().imag),
    "reshaped": replace(lambda each: each.reshape(each.shape[::-1])),
    "wider": replace(lambda each: torch.arange(24.0)[each.numel() % 7 :][:6].view(2, 3)),
    "swap": swap,
    "transposed": replace(lambda each: torch.ones(5, 4).t()),
    "strided": replace(
        lambda each: torch.randn(40)[3:39:3].reshape(2, 6) if each.numel() % 2 else torch.randn(40)[3::3]
    ),
    "scalar": replace(lambda each: torch.tensor(1.5)),
    "empty": replace(lambda each: torch.empty(0, 3)),
    "float8": replace(lambda each: torch.ones(each.shape).to(torch.float8_e4m3fn)),
    "sparse": replace(lambda each: torch.eye(3).to_sparse()),
    "subclass": replace(lambda each: torch.randn(3).as_subclass(Tagged)),
    "grown": replace(lambda each: torch.zeros(700)),
    "grad": replace(lambda each: torch.ones(each.shape).requires_grad_()),
    "resize": resize,
    "renew": renew,
    "alias": alias,
    "average": average,
    "attribute": attribute,
    "moments": lambda world, seed: world.begin_moments(),
    "moment": moment,
    "remove": remove,
    "number": add(lambda world, seed: seed**3 - 7),
    "text": add(lambda world, seed: "ü" * seed),
    "tensor": add(lambda world, seed: torch.arange(seed % 9)),
    "view": add(lambda world, seed: next(iter(world.model.values())).detach().view(-1)[:1]),
    "retyped": add(lambda world, seed: torch.zeros(4).view(torch.int32)),
    "key": add(lambda world, seed: {nth(world, seed): seed, "exp_avg": "cpu", "class": OrderedDict}),
    "keys": add(lambda world, seed: list(world.model)),
    "parameter": add(lambda world, seed: torch.nn.Parameter(torch.zeros(seed % 5))),
    "object": add(lambda world, seed: Box([seed, next(iter(world.model.values())), sys.intern("storage")])),
    "default": add(lambda world, seed: defaultdict(list, {n: [torch.zeros(1)] for n in range(seed % 40)})),
    "history": add(lambda world, seed: [float(n) for n in range(seed)]),
    "collections": add(lambda world, seed: [{"a": n, "b": (n, "cpu")} for n in range(seed % 50)]),
    "twice": add(lambda world, seed: [world.moments, world.moments]),
    "storage": add(lambda world, seed: torch.zeros(3).untyped_storage()),
    "numpy": add(lambda world, seed: torch.zeros(seed % 5).numpy()),
    "rng": add(lambda world, seed: {"torch": torch.get_rng_state()}),
    "bytes": add(lambda world, seed: b"q" * seed + bytes(range(256))),
    "cycle": add(lambda world, seed: world.more),
}
