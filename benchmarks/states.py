"""The states that benchmarks save: weights and optimizer states as Lightning dumps them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20


def make_state(mebibytes: int) -> dict[str, Any]:
    """Weights and Adam's two moments of a transformer-like model, about ``mebibytes`` MiB in all."""
    width = 1024
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    layer = sum(torch.Size(shape).numel() for shape in shapes) * 4
    layers = max(1, round(mebibytes * MIB / 3 / layer))

    def tensors() -> dict[str, torch.Tensor]:
        return {f"layers.{n}.{i}": torch.randn(shape) for n in range(layers) for i, shape in enumerate(shapes)}

    weights = tensors()
    moments = {
        i: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(w), "exp_avg_sq": torch.rand_like(w)}
        for i, w in enumerate(weights.values())
    }
    return {"state_dict": weights, "optimizer_states": [{"state": moments}], "global_step": 7, "epoch": 0}


def make_many(mebibytes: int, count: int) -> dict[str, Any]:
    """``count`` tensors of one size, about ``mebibytes`` MiB in all, as Lightning saves weights and Adam's moments."""
    size = max(1, mebibytes * MIB // 4 // count)
    weights = OrderedDict(
        (f"model.layers.{n // 2}.{'weight' if n % 2 else 'bias'}", torch.randn(size)) for n in range(count // 3)
    )
    moments = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size)}
        for n in range(len(weights))
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(weights)))}]
    return {
        "epoch": 0,
        "global_step": 0,
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 0, "completed": 0}}}},
        "optimizer_states": [{"state": moments, "param_groups": groups}],
    }


def at_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns a trainer's dump of another step: new dictionaries, keys and tensors that share the storages."""
    weights = OrderedDict((key[:1] + key[1:], tensor.detach()) for key, tensor in state["state_dict"].items())
    weights._metadata = OrderedDict((key.rpartition(".")[0], {"version": 1}) for key in weights)
    optimizers = [
        {"state": dict(each["state"]), "param_groups": [{**group, "lr": 1e-3 / step} for group in each["param_groups"]]}
        for each in state["optimizer_states"]
    ]
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": step, "completed": step}}}}
    new = {"global_step": step, "epoch": step // 10, "state_dict": weights, "loops": loops}
    return {**state, **new, "optimizer_states": optimizers}


def all_tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for child in children for tensor in all_tensors(child)]


def make_gpt(mebibytes: int) -> dict[str, Any]:  # noqa: ARG001 - its size is the demo's
    """The demo's GPT after one step of AdamW: some 25 MiB."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from gpt import GPT

    model = GPT(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(model.batch(1, 4)).backward()
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}


def make_lora(mebibytes: int) -> dict[str, Any]:
    """A frozen base in 64 tensors, and adapters with Adam's moments, 2 % of the bytes, in 96 tensors."""
    size = mebibytes * MIB // 4
    base = {f"base.{n}.weight": torch.randn(size * 98 // 100 // 64) for n in range(64)}
    adapters = {f"lora.{n}": torch.randn(size * 2 // 100 // 96) for n in range(32)}
    moments = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(each), "exp_avg_sq": torch.rand_like(each)}
        for n, each in enumerate(adapters.values())
    }
    return {"state_dict": {**base, **adapters}, "optimizer_states": [{"state": moments}], "global_step": 7, "epoch": 0}


def train(state: dict[str, Any]) -> None:
    """Changes of a LoRA state what a step changes."""
    trained = [tensor for name, tensor in state["state_dict"].items() if name.startswith("lora.")]
    for tensor in (*trained, *all_tensors(state["optimizer_states"])):
        tensor.add_(1.0)


STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "64 tensors": lambda mebibytes: make_even(mebibytes, 64),
    "20,000 tensors": lambda mebibytes: make_many(mebibytes, 20_000),
    "GPT with AdamW": make_gpt,
    "LoRA": make_lora,
}


def make_even(mebibytes: int, count: int) -> dict[str, Any]:
    """``count`` tensors of one size."""
    size = mebibytes * MIB // 4 // count
    return {"state_dict": {f"w{n}": torch.randn(size) for n in range(count)}, "global_step": 7, "epoch": 0}
