"""Plans of states whose structure is that of an earlier save, made from what was kept of its file."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections import OrderedDict
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch

from tiered_checkpoint_io.formats.assembly import Assembly, Template
from tiered_checkpoint_io.formats.filling import StorageRegions
from tiered_checkpoint_io.formats.image import Image, collecting_later, plan
from tiered_checkpoint_io.formats.records import Records
from tiered_checkpoint_io.formats.repeat import Repeat
from tiered_checkpoint_io.formats.skeleton import DoubtError, Skeleton, Tensors, rebuilt, scan

_T = TypeVar("_T")

_MAX_TEMPLATES = 32
_MAX_RECORDS = 4
_MAX_MET = 16
#: After so many plans in a row for which all that was done beside torch.save was of no use, some are made by torch.save
#: alone, ever more of them.
_PATIENCE = 3
_MAX_PAUSE = 64


class Layouts:
    """What is kept of the files of earlier saves: never a tensor, nor where one lies.

    The first save of a structure is planned by ``torch.save``, and just noted. So is the second one; then its file is
    made from its structure as well, and what makes it is kept where the two are equal byte for byte. Plans are made
    from that alone from the third save on. What is not as it was then is planned by ``torch.save``.
    """

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, Template] = OrderedDict()
        self._records: OrderedDict[Any, Records] = OrderedDict()
        self._forms: set[Any] = set()
        self._last: Repeat | None = None
        #: Files of earlier saves, as far as one is known by a number.
        self._met: OrderedDict[int, None] = OrderedDict()
        self._environment: Any = None
        self._misses = 0
        self._pause = 0
        #: How many plans were made from what was kept.
        self.reused = 0
        #: Whether the last one was; where its state had its large collections; and the size of its file, bytes.
        self._repeats, self._paths, self.size = False, tuple[Any, ...](), 0

    def take(self, state: object) -> Skeleton | None:
        """What :meth:`plan_taken` needs of a state, as it is now, but for what its tensors hold.

        Returns:
            None where it is to be planned at once: it can't be taken; or the plan before was not made from what is
            kept, so that this one may not be, either.
        """
        if self._repeats:
            with contextlib.suppress(Exception), collecting_later():
                return scan(state, self._paths)
        return None

    def plan_taken(self, taken: Skeleton) -> Image:
        """As :meth:`plan`, of a state that was taken; it may have changed since, but for its tensors' shapes."""
        with contextlib.suppress(Exception), collecting_later():
            self._note_environment()
            return self._known(taken)
        return self.plan(rebuilt(taken))

    def plan(self, state: object) -> Image:
        """As :func:`~tiered_checkpoint_io.formats.image.plan`.

        Raises:
            Exception: Whatever ``torch.save`` raises for this state.
        """
        try:
            self._note_environment()
        except AttributeError:
            # In this release of torch, other things decide.
            return plan(state)
        paused = self._pause > 0
        looks = bool(self._records) and not paused
        if looks:
            # Whatever the reason for which there is none, torch.save is the judge.
            with contextlib.suppress(Exception), collecting_later():
                return self._known(scan(state))
        self._repeats = False
        image = plan(state)
        number = hash(tuple([region.nbytes for region in image.regions]))
        learns = image.planned and number in self._met and not paused
        _remember(self._met, number, None, _MAX_MET)
        if learns:
            # What is not understood is not kept.
            with contextlib.suppress(Exception), collecting_later():
                self._learn(state, image)
        if paused:
            self._pause -= 1
        elif looks or learns:
            self._missed()
        return image

    def _note_environment(self) -> None:
        environment = _environment()
        if environment != self._environment:
            self._environment = environment
            for kept in (self._templates, self._records, self._forms, self._met):
                kept.clear()
            self._last, self._repeats = None, False
            self._misses = self._pause = 0

    def _missed(self) -> None:
        self._misses += 1
        pauses, of_two = divmod(self._misses - _PATIENCE, 2)
        # Always two in a row: the first one keeps what the second one may use.
        if pauses > 0 and of_two == 0:
            self._pause = min(_MAX_PAUSE, 1 << pauses)

    def _known(self, skeleton: Skeleton) -> Image:
        """The plan that is made from what is kept, of a state that was taken apart.

        Raises:
            DoubtError: Something of the state is not as it was when it was compared.
            Exception: Whatever pickling raises.
        """
        units = skeleton.units
        tensors = Tensors(skeleton.tensors, [(unit.tensors, self._templates.get(unit.data)) for unit in units])
        if not tensors.forms <= self._forms:
            raise DoubtError("a tensor is of a kind that was not met before")
        last = self._last
        pickled = last.pickle_of(skeleton, tensors) if last is not None else None
        if last is None or pickled is None:
            assembly = Assembly(skeleton, tensors, self._templates)
            key = _sizes(assembly, tensors)
            records = self._records.get(key)
            if records is None:
                raise DoubtError("the storages are of other sizes")
            self._keep(assembly, key, records)
            last, pickled = Repeat(skeleton, tensors, assembly, records), assembly.data
        records, move, self._last = last.records, last.move, last
        order = last.order
        if len(order) != len(records.lengths):
            order = [number for number in order if tensors.sizes[number]]
        storages, addresses = _chosen(tensors.storages, order), tensors.addresses[order]
        starts = np.zeros(len(storages), np.int64)
        # By identity, as most are one object: it takes a third of the time.
        offsets, devices = records.offsets + move, set({id(each): each for each in tensors.devices}.values())
        regions = StorageRegions(offsets, records.lengths, storages, starts, devices, addresses)
        self._repeats, self._misses = True, 0
        self._paths, self.size = skeleton.paths, records.size + move
        self.reused += 1
        return Image(self.size, functools.partial(records.around, pickled), regions)

    def _learn(self, state: object, image: Image) -> None:
        """Keeps what makes a file from its structure, where that has turned out to be what ``torch.save`` makes.

        Raises:
            DoubtError: It is not, or the file is laid out in a way that is not known here.
            Exception: Whatever pickling raises.
        """
        skeleton = scan(state)
        tensors = Tensors(skeleton.tensors)
        assembly = Assembly(skeleton, tensors, self._templates, learn=True)
        regions = image.regions
        wanted = [tensors.identities[number] for number in assembly.order if tensors.sizes[number]]
        if [region.storage._cdata for region in regions] != wanted:
            raise DoubtError("the records are others")
        offsets, lengths = [region.offset for region in regions], [region.nbytes for region in regions]
        records = Records(image.segments, offsets, lengths, image.size, _alignment())
        if records.pickle_in(image.segments) != assembly.data:
            raise DoubtError("the pickle is another")
        self._forms |= tensors.forms
        self._keep(assembly, _sizes(assembly, tensors), records)

    def _keep(self, assembly: Assembly, key: Any, records: Records) -> None:
        _remember(self._records, key, records, _MAX_RECORDS)
        for data, template in assembly.templates.items():
            _remember(self._templates, data, template, _MAX_TEMPLATES)


def _sizes(assembly: Assembly, tensors: Tensors) -> tuple[int, ...]:
    """The sizes of all storages, in the order of the file's records."""
    return _chosen(tensors.sizes, assembly.order)


def _chosen(values: list[_T], numbers: list[int]) -> tuple[_T, ...]:
    """Some of many values, in the order of their numbers."""
    if len(numbers) < 2:
        return tuple([values[number] for number in numbers])
    chosen: tuple[_T, ...] = itemgetter(*numbers)(values)
    return chosen


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
