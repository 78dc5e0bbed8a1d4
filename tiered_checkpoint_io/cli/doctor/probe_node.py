"""Measures this node. Looks, and changes nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

from tiered_checkpoint_io.cli.doctor.facts import NodeFacts, StateSize, Tmpfs
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.inventory.roots import tier_at
from tiered_checkpoint_io.memory.node import is_tmpfs, memory_left, memory_limit, mounts
from tiered_checkpoint_io.memory.spill import AUTO, spill_dir_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_PACKAGE = "tiered-checkpoint-io"
#: Whose releases matter to what is stored and loaded.
_JUDGED = ("torch", "lightning", "boto3")


def probe_node(config: TieredCheckpointConfig) -> NodeFacts:
    """Measures what a configuration's memory tier needs of this node."""
    folder = config.memory_dir
    memory = _file_system(folder)
    spill_dir = spill_dir_of(config.spill_dir)
    spill = _file_system(spill_dir) if spill_dir is not None else None
    free = None if spill is None else spill.free // (2 if config.spill_dir == AUTO else 1)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    versions, supported = _versions()
    return NodeFacts(
        memory_dir=folder,
        memory=memory if os.path.isdir(folder) else None,
        is_tmpfs=is_tmpfs(folder),
        is_writable=os.access(folder, os.W_OK | os.X_OK),
        other_tmpfs=tuple(_other_tmpfs(folder)),
        machine_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_limit=memory_limit(),
        memory_left=memory_left(),
        spill_dir=spill_dir,
        spill_free=free,
        spill_is_tmpfs=spill_dir is not None and is_tmpfs(spill_dir),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=len(os.sched_getaffinity(0)),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        container=_container(),
        versions=versions,
        supported=supported,
    )


def last_state(root: Path) -> StateSize:
    """The size of the latest save that a namespace has on this node."""
    parts = []
    with contextlib.suppress(OSError):
        parts = tier_at(root).parts()
    newest = max((each.save_id for each in parts), default="")
    size = sum(each.part.content.size for each in parts if each.save_id == newest)
    return StateSize(size, f"the last run's, {parts[-1].part.name}") if size else StateSize()


def last_configs(roots: list[Path]) -> dict[Path, TieredCheckpointConfig]:
    """The configurations of the last trainers, where they can be read."""
    found = {root: last_config(root) for root in roots}
    return {root: config for root, config in found.items() if config is not None}


def _file_system(path: str) -> Tmpfs | None:
    """The file system of a folder, or of the first above it that exists."""
    try:
        near = next(each for each in (Path(path), *Path(path).parents) if each.is_dir())
        facts = os.statvfs(near)
    except (OSError, StopIteration):
        return None
    return Tmpfs(path, facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize)


def _other_tmpfs(folder: str) -> list[Tmpfs]:
    """File systems in memory that are open to checkpoints, besides that of a folder."""
    there: list[str] = []
    with contextlib.suppress(OSError):
        there = [path for path, kind in mounts() if kind == "tmpfs"]
    others = [each for each in there if not os.path.realpath(folder).startswith(each.rstrip("/") + "/")]
    usable = (
        each for each in others if each != os.path.realpath(folder) and not each.startswith(("/run", "/sys", "/proc"))
    )
    found = [_file_system(each) for each in usable if os.path.isdir(each) and os.access(each, os.W_OK | os.X_OK)]
    return [each for each in found if each is not None]


def _container() -> str:
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    return "docker" if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") else ""


def _versions() -> tuple[dict[str, str], dict[str, str]]:
    """What is installed, and what this package supports, as its own metadata says."""
    versions, supported = {"python": platform.python_version()}, {}

    def read(ask: Callable[[], str | None]) -> str:
        try:
            return ask() or ""
        except importlib.metadata.PackageNotFoundError:
            return ""

    supported["python"] = read(lambda: importlib.metadata.metadata(_PACKAGE)["Requires-Python"])
    needs: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        needs = importlib.metadata.requires(_PACKAGE) or []
    for each in map(Requirement, needs):
        if each.name in _JUDGED and each.marker is None:
            supported[each.name] = str(each.specifier)
            versions[each.name] = read(lambda name=each.name: importlib.metadata.version(name))  # type: ignore[misc]
    return versions, supported
