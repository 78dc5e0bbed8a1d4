"""A state with tensors that have no memory of their own is saved as stock Lightning saves it, and loads back."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_map

from tests.support.training import Model
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

EVERY = {"save_top_k": -1, "every_n_train_steps": 5, "filename": "{step}"}
#: The default trust allows no class by which such tensors are made, and neither does torch's.
ALLOWED = ["torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer"]


class NoStorage(torch.Tensor):
    """A tensor that holds another one, as quantized weights do: asked for its storage, it raises."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(each):
            return each.inner if isinstance(each, cls) else each

        result = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda each: cls(each) if isinstance(each, torch.Tensor) else each, result)

    def __tensor_flatten__(self):
        return ["inner"], None

    def untyped_storage(self):
        raise ValueError("it has no storage")


class Uncommon(Model):
    """Has layers that no batch has used yet, a buffer whose storage can't be had, and a tensor on the meta device."""

    def __init__(self):
        super().__init__()
        self.later, self.normed = torch.nn.LazyLinear(7), torch.nn.LazyBatchNorm1d()
        self.register_buffer("wrapped", NoStorage(torch.arange(6.0)))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["nowhere"] = torch.ones(3, device="meta")


def shown(value):
    """Returns a state as plain data."""
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    if isinstance(value, NoStorage):
        return ["wrapped", value.inner.tolist()]
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return ["lazy", type(value).__name__]
        return [str(value.device), value.tolist() if not value.is_meta else list(value.shape)]
    return value


@pytest.mark.parametrize("staging", ["eager", "overlapped"])
def test_every_save_is_stocks(runs, tmp_path, staging):
    callback = ModelCheckpoint(tmp_path / "stock", **EVERY)
    stock = Trainer(callbacks=[callback], max_steps=20, logger=False, accelerator="cpu", enable_progress_bar=False)
    stock.fit(Uncommon())
    wanted = {file.name: torch.load(file, weights_only=False) for file in (tmp_path / "stock").iterdir()}
    assert len(wanted) == 4

    options = {"staging": staging, "on_save_error": "raise", "safe_globals": [*ALLOWED, f"{__name__}.NoStorage"]}
    trainer, _ = runs.fit(
        TieredModelCheckpoint(memory_every_n_train_steps=1, s3_every_n_train_steps=5, save_top_k=-1, filename="{step}"),
        model=Uncommon(),
        io=runs.io(**options),
    )
    counts = trainer.io.checkpointer.session.counts
    assert (counts["saved"], counts["failed"]) == (20, 0)
    assert runs.durable() == sorted(wanted)
    for name, state in wanted.items():
        got = torch.load(tmp_path / "durable" / name, weights_only=False)
        for part in ("state_dict", "optimizer_states", "global_step", "nowhere"):
            assert shown(got.get(part)) == shown(state.get(part)), (name, part)

    resumed, model = runs.fit(model=Uncommon(), io=runs.io(**options), max_steps=25)
    assert resumed.global_step == 25
    assert resumed.io.checkpointer.restored.step == 20
    assert shown(model.state_dict()).keys() == shown(wanted["step=20.ckpt"]["state_dict"]).keys()
