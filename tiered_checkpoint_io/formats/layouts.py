"""Plans of states whose structure is that of an earlier save, made from what was kept of its file."""

from __future__ import annotations

import contextlib
import copyreg
import gc
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from tiered_checkpoint_io.formats.assembly import Assembly, Template
from tiered_checkpoint_io.formats.filling import StorageRegion
from tiered_checkpoint_io.formats.image import Image, plan
from tiered_checkpoint_io.formats.records import Records
from tiered_checkpoint_io.formats.skeleton import Tensors, scan

_T = TypeVar("_T")

_MAX_TEMPLATES = 32
_MAX_RECORDS = 4
#: After so many plans in a row for which nothing kept was of use, some are made without a look, ever more of them.
_PATIENCE = 3
_MAX_PAUSE = 64


class Layouts:
    """What is kept of the files of earlier saves: never a tensor, nor where one lies.

    A plan is made from it only where ``torch.save`` has written the same structure of tensors before, and the two were
    equal byte for byte. For all others, ``torch.save`` plans.
    """

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, Template] = OrderedDict()
        self._records: OrderedDict[Any, Records] = OrderedDict()
        self._forms: set[Any] = set()
        self._environment: Any = None
        self._misses = 0
        self._pause = 0
        #: How many plans were made from what was kept.
        self.reused = 0

    def plan(self, state: object) -> Image:
        """As :func:`~tiered_checkpoint_io.formats.image.plan`.

        Raises:
            Exception: Whatever ``torch.save`` raises for this state.
        """
        if self._pause:
            self._pause -= 1
            return plan(state)
        try:
            with _collecting_later():
                found = self._look(state)
        except Exception:
            # Whatever the reason, torch.save is the judge.
            self._missed()
            return plan(state)
        assembly, tensors, key, image = found
        if image is not None:
            self._misses = 0
            self.reused += 1
            return image
        image = plan(state)
        try:
            self._keep(assembly, tensors, key, image)
        finally:
            self._missed()
        return image

    def _missed(self) -> None:
        self._misses += 1
        pauses, of_two = divmod(self._misses - _PATIENCE, 2)
        # Always two in a row: the first one keeps what the second one may use.
        if pauses > 0 and of_two == 0:
            self._pause = min(_MAX_PAUSE, 1 << pauses)

    def _look(self, state: object) -> tuple[Assembly, Tensors, Any, Image | None]:
        environment = _environment()
        if environment != self._environment:
            self._templates.clear()
            self._records.clear()
            self._forms.clear()
            self._environment, self._misses = environment, 0
        skeleton = scan(state)
        tensors = Tensors(skeleton.tensors)
        assembly = Assembly(skeleton, tensors, self._templates)
        key = tuple([tensors.sizes[number] for number in assembly.order])
        records = self._records.get(key)
        if records is None or not assembly.is_known or not tensors.forms <= self._forms:
            return assembly, tensors, key, None
        size, segments, move = records.around(assembly.data)
        storages = [tensors.storages[number] for number in assembly.order if tensors.sizes[number]]
        offsets = [offset + move for offset in records.offsets] if move else records.offsets
        regions = tuple(map(StorageRegion, offsets, records.lengths, storages))
        _remember(self._records, key, records, _MAX_RECORDS)
        for data, template in assembly.templates.items():
            _remember(self._templates, data, template, _MAX_TEMPLATES)
        return assembly, tensors, key, Image(size, tuple(segments), regions)

    def _keep(self, assembly: Assembly, tensors: Tensors, key: Any, image: Image) -> None:
        """Keeps what has turned out to be equal to what ``torch.save`` makes."""
        if not image.planned:
            return
        regions = image.regions
        wanted = [tensors.identities[number] for number in assembly.order if tensors.sizes[number]]
        if [region.storage._cdata for region in regions] != wanted:
            return
        try:
            offsets, lengths = [region.offset for region in regions], [region.nbytes for region in regions]
            records = Records(image.segments, offsets, lengths, image.size, _alignment())
        except Exception:
            # The file is laid out in a way that is not known here.
            return
        if records.pickle_in(image.segments) != assembly.data:
            return
        self._forms |= tensors.forms
        _remember(self._records, key, records, _MAX_RECORDS)
        for data, template in assembly.templates.items():
            _remember(self._templates, data, template, _MAX_TEMPLATES)


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Without the garbage collector, which would look at all objects of the process several times meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _remember(kept: OrderedDict[Any, _T], key: Any, value: _T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _alignment() -> int:
    get = getattr(torch.serialization, "_get_storage_alignment", None)
    return int(get()) if get is not None else 64


def _environment() -> tuple[Any, ...]:
    """What else decides on how ``torch.save`` writes a tensor."""
    tensor, module = torch.Tensor, torch.serialization
    replaced = (tensor.__reduce_ex__, tensor._reduce_ex_internal, copyreg.dispatch_table.get(tensor))
    options = (module.get_crc32_options(), _alignment(), module.DEFAULT_PROTOCOL, tuple(module._package_registry))
    return (torch.save, module._save, *replaced, *options)
