"""What a rank writes: the file that DCP's plan and planner give, planned before anything is copied."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tiered_checkpoint_io.adapters.file_layout import FileLayout, PlannedFile, planned_file
from tiered_checkpoint_io.adapters.tensor_kinds import CheckingSavePlanner, KindsCheck
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.shard_image import Item
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def transforms_of(extensions: Sequence[Any] | None) -> Any:
    """DCP's stream transformations by ``_extensions``; None where there are none.

    Raises:
        ConfigError: This torch has no such thing.
    """
    if not extensions:
        return None
    if not hasattr(filesystem, "_StorageWriterTransforms"):
        raise ConfigError("_extensions need torch 2.7", hint="upgrade torch, or leave them out")
    return filesystem._StorageWriterTransforms(extensions)


def file_of(
    plan: SavePlan,
    planner: SavePlanner,
    transforms: Any,
    config: TieredCheckpointConfig,
    warn: Callable[[list[Any]], None],
) -> PlannedFile:
    """The file of a rank's plan.

    Args:
        plan: Its items.
        planner: What gives their data; one of ours may keep how they lie for the next save.
        transforms: What the bytes of each go through; see :func:`transforms_of`.
        config: Which objects a load will take.
        warn: Gets the bytes of all objects.
    """
    # What else may happen to an item is not kept.
    known = planner if isinstance(planner, CheckingSavePlanner) and transforms is None else None
    structure = known.structure if known is not None else None
    layout: FileLayout | None = structure.layout if structure is not None else None
    if known is not None and layout is not None and layout.plan is plan:
        found: list[Any] = [known.resolve_data(item) for item in layout.objects]
        objects = [each.getvalue() for each in found]
        warn(objects)
        return layout.file(objects, known.state_dict)
    # As FileSystemWriter orders them.
    ordered = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
    kinds = KindsCheck(Trust.of(config))
    items = [_item(item, planner, transforms, kinds) for item in ordered]
    warn([data for data, names in items if not (names or isinstance(data, torch.Tensor))])
    if structure is not None:
        # What can't be kept is planned anew each time.
        with contextlib.suppress(ValueError):
            structure.layout = FileLayout(plan, ordered, [data for data, _ in items])
    return planned_file(ordered, [data for data, _ in items], [[names] if names else [] for _, names in items])


def _item(item: WriteItem, planner: SavePlanner, transforms: Any, kinds: KindsCheck) -> tuple[Item, list[str]]:
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        kinds.check(item.index.fqn, data)
    if transforms is None:
        return (data.detach() if isinstance(data, torch.Tensor) else data.getvalue()), []
    buffer = io.BytesIO()
    stream, names = transforms.transform_save_stream(item, buffer)
    if isinstance(data, torch.Tensor):
        torch.save(data.detach().cpu().clone(), stream)
    else:
        stream.write(data.getbuffer())
    stream.close()
    return buffer.getvalue(), names
