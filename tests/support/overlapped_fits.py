"""Trainings at random that save while they train: each checkpoint is compared with a copy, made when its save began.

Drawn are: the layout of parameters in memory, and their neighbours; changes of these, by whom and when; the optimizers,
and who steps them; averages, late parameter groups, other weights for validation, objects of the state that are
replaced; and whether something writes to a parameter if nothing may.
"""

import collections
import copy
import functools
import random
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tiered_checkpoint_io.engine.save.facts import FOUND_CHANGED
from tiered_checkpoint_io.engine.save.overlap import CHECK, Overlapped
from tiered_checkpoint_io.engine.staging import BackgroundTask
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.strategies import TieredModelParallelStrategy


class ExtrapolatedClosure(torch.optim.SGD):
    """Changes its parameters before it calls the closure, as schedulefree's optimizers of such names do."""

    def step(self, closure=None):
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.data.mul_(0.99)
        return super().step(closure)


class Sharp(ExtrapolatedClosure):
    """An optimizer that is stepped only by hand."""


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AMSGrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.01, max_iter=2),
    "before its closure": functools.partial(ExtrapolatedClosure, lr=0.01, momentum=0.9),
    "by hand": functools.partial(Sharp, lr=0.01, momentum=0.9),
}
#: Optimizers of torch that take sharded tensors and others one by one.
SHARDED = ["AdamW", "SGD"]
#: Hooks between the end of a batch, at which saves are, and the optimizer's step, which waits for their copies.
BEFORE_STEP = ["on_train_batch_start", "training_step", "on_before_zero_grad", "on_after_backward"]
#: Some of the hooks in which anything may change.
AFTER_WAIT = ["on_before_optimizer_step", "on_train_epoch_end", "on_validation_start", "on_train_batch_end"]
#: So long a capture is put off, seconds, unless something waits for it: what may change by then has changed.
LATE_S = 20


# -------------------------------------------------------------------------------- how parameters lie in memory
def of_bytes(count, more):
    whole = torch.zeros(4 * (count + more), dtype=torch.uint8)
    return [each.view(torch.float32) for each in whole.split([4 * count, 4 * more])]


def whole(count, more):
    flat = torch.randn(count + more)
    return flat[:count], flat


def one_array(count, more):
    array = np.ones(count + more, np.float32)
    return torch.from_numpy(array)[:count], torch.from_numpy(array)[count:]


def two_arrays(count, more):
    array = np.ones(count + more, np.float32)
    return torch.from_numpy(array[:count]), torch.from_numpy(array[count:])


def transposed_front(count, more):
    block = torch.randn(5, count // 4)
    return block[:4].t(), block[4]


def crossed(count, more):
    flat = torch.randn(8)
    return flat.as_strided((2, 2, 2), (1, 1, 5)), flat[3:5]


#: A parameter of so many elements, and what else lies there, of so many more.
CONTIGUOUS = {
    "own": lambda count, more: (torch.randn(count), None),
    "front": lambda count, more: torch.randn(count + more).split([count, more]),
    "back": lambda count, more: torch.randn(count + more).split([more, count])[::-1],
    # Another saved tensor begins at the parameter's address, and only the remainder changes.
    "whole": whole,
    "of_bytes": of_bytes,
    "tail": lambda count, more: (torch.randn(count + more)[:count], None),
    "empty": lambda count, more: (torch.randn(count), torch.zeros(0)),
    # Two storages over the same memory; and one behind the other.
    "one_array": one_array,
    "two_arrays": two_arrays,
}
LAYOUTS = {
    **CONTIGUOUS,
    "columns": lambda count, more: torch.randn(count // 4, 8).split(4, 1),
    "every_other": lambda count, more: torch.randn(count, 2).unbind(1),
    "transposed": lambda count, more: (torch.randn(4, count // 4).t(), None),
    "transposed_front": transposed_front,
    # The span's number of elements; one of them twice, and another never.
    "crossed": crossed,
}


def write(tensor, way):
    """Changes a tensor: in its place, also unseen by its version counter; or by another in its place."""
    with torch.no_grad():
        if way == "in place":
            tensor.mul_(0.5).add_(1)
        elif way == "unseen":
            tensor.data.mul_(0.5).add_(1)
        elif way == "replaced":
            tensor.data = tensor.detach() * 0.5 + 1
        elif way == "cut":
            tensor.data = tensor.detach()[: max(1, len(tensor) - 1)]
        elif way == "turned" and tensor.dim() == 2:
            tensor.t_()


def step_in_backward(weight):
    weight.data.add_(weight.grad, alpha=-0.01)


# ------------------------------------------------------------------------------------------------ trainings
class Drawn(LightningModule):
    def __init__(self, draw, *, sharded):
        super().__init__()
        torch.manual_seed(draw.randrange(1000))
        self.draw, self.is_sharded = draw, sharded
        self.way = draw.choice(["automatic", "automatic", "automatic", "manual", "raw"])
        self.automatic_optimization = self.way == "automatic"
        left_out = {"LBFGS", "before its closure"} if self.way != "automatic" else {"by hand"}
        self.optimizer = draw.choice(SHARDED if sharded else sorted({*OPTIMIZERS} - left_out))
        # Most is the optimizers' own: else no save overlaps.
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 2))
        self.features = torch.nn.Embedding(4, 8, max_norm=draw.choice([None, 0.5]))
        self.late, self.late_at = torch.nn.Parameter(torch.randn(4)), draw.choice([None, 2, 5])
        self.weights = torch.nn.ParameterList()
        #: State that no optimizer changes, and the time and way of its changes.
        self.others, self.kept, self.aliases = [], {}, []
        # LBFGS takes only gradients without gaps.
        layouts = CONTIGUOUS if self.optimizer == "LBFGS" else LAYOUTS
        self.layouts = [draw.choice([*layouts]) for _ in range(draw.randrange(1, 4))]
        for number, layout in enumerate(self.layouts):
            self.lay_out(f"other{number}", layout)
        if draw.random() < 0.3:
            self.weights.append(self.weights[0])
        self.shards, self.swaps = sharded and draw.random() < 0.5, draw.random() < 0.2
        if self.way == "automatic" and draw.random() < 0.2:
            self.net[0].weight.register_post_accumulate_grad_hook(step_in_backward)

    def lay_out(self, name, layout):
        draw = self.draw
        data, other = LAYOUTS[layout](4 * draw.randrange(1, 12), draw.randrange(1, 40))
        # With a version counter of its own, or not.
        weight = torch.nn.Parameter(data.data if draw.random() < 0.5 else data)
        self.weights.append(weight)
        ways, holder = (
            ["in place", "unseen", "replaced"],
            draw.choice(["buffer", "frozen", "free", "state", "alias", "alias"]),
        )
        if holder == "alias":
            other, ways = weight.detach().clone(), ["replaced", "cut", "turned"]
            self.aliases.append((other, weight))
        if other is None:
            return
        changed = other
        if holder == "buffer":
            self.register_buffer(name, other)
        elif holder in ("frozen", "free"):
            setattr(self, name, torch.nn.Parameter(other, requires_grad=holder == "free"))
            changed = getattr(self, name)
        else:
            self.kept[name] = other
        if layout == "whole" and holder != "alias":
            changed, ways = changed.detach()[len(data) :], ways[:2]
        self.others.append((changed, draw.choice(BEFORE_STEP * 3 + AFTER_WAIT), draw.choice(ways)))

    def configure_model(self):
        if self.shards:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.shards = False

    def get_extra_state(self):
        # DCP keeps nothing of what is empty.
        return {"way": self.way, **self.kept}

    def set_extra_state(self, state):
        self.kept = state

    def change(self, hook):
        for tensor, when, way in self.others:
            if when == hook:
                write(tensor, way)

    def loss(self):
        batch = torch.sin(torch.arange(64.0).view(8, 8) * (1 + self.global_step % 7))
        loss = self.net(batch + self.features(torch.arange(8) % 4)).pow(2).mean()
        return loss + sum((each - 1).pow(2).mean() for each in (*self.weights, self.late))

    def training_step(self, *_):
        self.change("training_step")
        if self.automatic_optimization:
            return self.loss()
        for number, each in enumerate(self.optimizers()):
            each.zero_grad()
            loss = self.loss()
            self.manual_backward(loss)
            # Of the first, Lightning does not always know.
            (each.optimizer if self.way == "raw" and not number else each).step()
        return loss

    def validation_step(self, *_):
        return self.weights[0].mean()

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        if self.swaps:
            self.before = self.features.weight.detach().clone()
            self.features.weight.data.mul_(0.5)

    def on_validation_model_train(self):
        super().on_validation_model_train()
        if self.swaps:
            self.features.weight.data.copy_(self.before)

    def configure_optimizers(self):
        make, own = OPTIMIZERS[self.optimizer], [*self.weights.parameters(), *self.features.parameters()]
        own += [each for each, *_ in self.others if isinstance(each, torch.nn.Parameter) and not each.requires_grad]
        if self.automatic_optimization:
            return make([*self.net.parameters(), *own])
        return [make(self.net.parameters()), torch.optim.SGD(own, lr=0.1, momentum=0.5)]

    def train_dataloader(self):
        return DataLoader(torch.zeros(6, 1))

    val_dataloader = train_dataloader


class Others(Callback):
    """Changes tensors that are no optimizer's; a parameter, if it may; and once, if it may not."""

    def __init__(self, model, allowed, careless):
        self.model, self.allowed, self.careless = model, allowed, careless

    def change(self, trainer, hook):
        self.model.change(hook)
        if hook == "on_before_optimizer_step":
            for own, weight in self.model.aliases:
                # Over the same memory, until it is replaced.
                own.data = weight.detach()
        if hook == self.allowed:
            write(self.model.net[2].bias, "unseen")
        if self.careless is not None and trainer.global_step >= self.careless[0] and hook == self.careless[1]:
            write(self.model.net[2].bias, self.careless[2])
            self.careless = None

    def on_train_batch_end(self, trainer, *_):
        model = self.model
        if model.late_at is not None and trainer.global_step >= model.late_at and model.optimizer != "LBFGS":
            model.late_at = None
            trainer.optimizers[0].add_param_group({"params": [model.late], "lr": 0.02})
        self.change(trainer, "on_train_batch_end")

    def state_dict(self):
        return dict(self.model.kept)


def _changes(hook):
    return lambda self, trainer, *_: self.change(trainer, hook)


for _hook in {*BEFORE_STEP, *AFTER_WAIT} - {"training_step", "on_train_batch_end"}:
    setattr(Others, _hook, _changes(_hook))


class Saves(Callback):
    """Saves after most batches, and now and then elsewhere."""

    def __init__(self, draw, prefix):
        self.draw, self.prefix, self.count = draw, prefix, 0

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, 0.7)

    def on_before_optimizer_step(self, trainer, *_):
        self.save(trainer, 0.05)

    on_train_epoch_end = on_validation_end = on_before_optimizer_step

    def save(self, trainer, chance):
        if self.draw.random() < chance:
            self.count += 1
            trainer.save_checkpoint(f"{self.prefix}-{self.count}.ckpt")


def averaging(draw, model):
    """Averages of the weights, by Lightning's own callbacks."""
    if model.is_sharded or not model.automatic_optimization or model.optimizer == "LBFGS" or model.late_at is not None:
        return []
    kind = draw.choice(["", "", "SWA", "EMA"])
    if kind == "SWA":
        return [stock.StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    return [stock.EMAWeightAveraging(decay=0.9)] if kind == "EMA" and hasattr(stock, "EMAWeightAveraging") else []


class Fits:
    """Trains, and compares.

    Attributes:
        counts: Number of saves of each way, and of the checkpoints to compare.
        defects: Checkpoints that are not as their copies, saves that failed without a reason, and such as were not loud.
    """

    def __init__(self, runs, patch, caplog):
        self.runs, self.patch, self.caplog = runs, patch, caplog
        self.counts, self.defects, self.waiting = collections.Counter(), [], []
        wait = BackgroundTask.wait

        def waiting(task):
            busy = [task] if task.is_busy else []
            self.waiting += busy
            try:
                wait(task)
            finally:
                for each in busy:
                    self.waiting.remove(each)

        patch.setattr(BackgroundTask, "wait", waiting)

    def fit(self, seed, *, sharded=False):
        """Trains once."""
        draw = random.Random(seed)
        self.draw, self.copies = draw, {}
        model, prefix = Drawn(draw, sharded=sharded), f"{self.runs.dirpath}/{seed}"
        hooks, way = (
            [each for each in BEFORE_STEP if each != "training_step"],
            draw.choice(["in place", "replaced", "unseen"]),
        )
        careless = (draw.randrange(1, 5), draw.choice(hooks), way) if draw.random() < 0.4 else None
        # The comparison finds changes without a trace.
        self.patch.setenv(CHECK, "1" if careless and way == "unseen" else "")
        is_late = careless is not None or draw.random() < 0.8
        self.patch.setattr(Overlapped, "let_caller_return", lambda taken: self.put_off(taken) if is_late else None)
        allowed = draw.choice([None, *AFTER_WAIT[:3]])
        callbacks = [Others(model, allowed, careless), *averaging(draw, model), Saves(draw, prefix)]
        if draw.random() < 0.5:
            callbacks.reverse()
        self.facts = f"{seed=} {sharded=} {model.way} {model.optimizer} {model.layouts}"
        self.facts += f" {[each[1:] for each in model.others]} {allowed=} {careless=}"
        trainer = self.trainer(model, callbacks, sharded=sharded)
        before = len(self.caplog.records)
        trainer.fit(model)
        said = [each.getMessage() for each in self.caplog.records[before:]]
        for name, state in self.copies.items():
            self.compare(trainer, name, state, said, may_fail=careless is not None)
        trainer.io.teardown()
        self.runs.wipe()

    def trainer(self, model, callbacks, *, sharded):
        io = self.runs.io(staging="overlapped", memory_keep_last=1000, max_pending=1000)
        trainer = self.runs.trainer(
            callbacks,
            io=io,
            enable_checkpointing=False,
            max_epochs=3,
            max_steps=self.draw.randrange(6, 14),
            accumulate_grad_batches=self.draw.choice([1, 1, 2]) if model.automatic_optimization else 1,
            val_check_interval=self.draw.choice([1.0, 0.5]),
            num_sanity_val_steps=0,
            **({"strategy": TieredModelParallelStrategy(1, 1), "devices": 1} if sharded else {}),
        )
        save, tiers = trainer.strategy.save_checkpoint, ["memory", *(["durable"] if sharded else [])]

        def saving(state, path, storage_options=None):
            self.copies[Path(path).name] = copy.deepcopy(state)
            save(state, path, storage_options=storage_options or {"tiers": tiers})
            report = io.checkpointer.session.last_save
            self.counts["overlapped" if report is not None and report.overlapped else "eager"] += 1

        trainer.strategy.save_checkpoint = saving
        return trainer

    def put_off(self, overlapped):
        """Waits until something waits for the capture."""
        for _ in range(LATE_S * 1000):
            if self.waiting or overlapped.wanted.wait(0.001):
                return

    def compare(self, trainer, name, state, said, *, may_fail):
        try:
            if trainer.lightning_module.is_sharded:
                found = loaded(Path(self.runs.dirpath) / name)
            else:
                found = trainer.io.load_checkpoint(name, weights_only=False)
        except (CheckpointNotFoundError, FileNotFoundError):
            self.counts["failed"] += 1
            is_loud = any(name in text and "the checkpoint is not saved: a parameter, or" in text for text in said)
            if not (may_fail and is_loud):
                self.defects.append(f"{self.facts}: {name} is not there, though nothing is wrong, or without a word")
            elif not any(text.endswith(FOUND_CHANGED) for text in said) and name != list(self.copies)[-1]:
                self.defects.append(f"{self.facts}: {name} has failed, and later saves are not eager")
            return
        except CheckpointException as error:
            self.defects.append(f"{self.facts}: {name} can't be read: {error}")
            return
        self.counts["compared"] += 1
        if (where := difference(found, state)) is not None:
            self.defects.append(f"{self.facts}: {name}: {where}")


# --------------------------------------------------------------------------------------------------- oracle
def loaded(folder):
    """Returns a sharded checkpoint, as what was saved."""
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(folder)
    found = _load_distributed_checkpoint(folder)
    optimizers = [found.pop(key) for key in sorted(found) if key.startswith("optimizer_")]
    (rest,) = folder.glob("meta*.pt")
    # Of an optimizer without a state, DCP keeps nothing.
    states = [{"state": {}, **each} for each in optimizers]
    return {**torch.load(rest, weights_only=False), **found, "optimizer_states": states}


def difference(one, other, at=""):
    """Returns the place at which two states differ in a bit; None if they are equal."""
    if isinstance(one, torch.Tensor):
        one, other = (getattr(each, "full_tensor", lambda each=each: each)().detach() for each in (one, other))
        is_same = (one.dtype, one.shape) == (
            other.dtype,
            other.shape,
        ) and one.numpy().tobytes() == other.numpy().tobytes()
        return None if is_same else at
    if isinstance(one, dict):
        pairs = (
            [(f"{at}[{key!r}]", one[key], other[key]) for key in one] if one.keys() == other.keys() else [(at, 0, 1)]
        )
    elif isinstance(one, list | tuple):
        pairs = [(f"{at}[{n}]", *each) for n, each in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else f"{at}: {one!r}, was {other!r}"
    return next((found for where, *both in pairs if (found := difference(*both, where)) is not None), None)
