"""What ``doctor`` measures, as plain data: judgements need nothing else. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

#: Stands for a durable tier where none is named: nothing is asked of it.
NOWHERE = "/"

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of what is found."""

    group: Annotated[str, "``node``, ``durable`` or ``network``."]
    status: Annotated[
        Status, "``warn`` where something works, but worse than it could; ``fail`` where something does not."
    ]
    what: Annotated[str, "What was looked at."]
    measured: Annotated[str, "What was found."]
    do: Annotated[str, "What to do; empty for nothing."] = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that should differ from its default here."""

    key: Annotated[str, "A key of docs/configuration.md."]
    value: Annotated[object, "The value that it should have."]
    reason: Annotated[str, "Why."]


class StateSize(NamedTuple):
    """The size of one checkpoint's bytes on this node, and where that is known from; None where it is not."""

    size: int | None = None
    source: str = ""


class Tmpfs(NamedTuple):
    """A file system in memory."""

    path: str
    size: int
    free: int


class NodeFacts(NamedTuple):
    """What was measured of this node.

    Attributes:
        memory_dir: Where the memory tier lies.
        memory: Its file system; None where the folder does not exist.
        is_tmpfs: Whether that is in memory.
        is_writable: Whether this user may write there.
        other_tmpfs: Further file systems in memory that this user may write to.
        machine_memory: What the machine has.
        memory_limit: What this process may use: less, in a container or a job with a limit.
        memory_left: What is unused of it, less a margin.
        spill_dir: Where the spill lies; None for none.
        spill_free: What it may take; None where that can't be told.
        spill_is_tmpfs: Whether it lies in memory, too.
        memlock: The limit of locked memory; None for none.
        descriptors: How many files this process may open.
        cores: That this process may use.
        numa_nodes: Of the machine.
        has_rdma: Whether there is an InfiniBand or EFA device.
        container: ``kubernetes``, ``docker``, or "".
        versions: Of python and packages; "" where it is not installed.
        supported: Which versions are, by the same names, as pip writes it.
    """

    memory_dir: str
    memory: Tmpfs | None
    is_tmpfs: bool
    is_writable: bool
    other_tmpfs: tuple[Tmpfs, ...]
    machine_memory: int
    memory_limit: int
    memory_left: int
    spill_dir: str | None
    spill_free: int | None
    spill_is_tmpfs: bool
    memlock: int | None
    descriptors: int
    cores: int
    numa_nodes: int
    has_rdma: bool
    container: str
    versions: Mapping[str, str]
    supported: Mapping[str, str]


class RateFacts(NamedTuple):
    """Bytes a second to and from the durable tier, by so many bytes."""

    up: float
    down: float
    size: int
