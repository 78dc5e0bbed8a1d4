"""What the measured facts of a node mean: pure functions."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tiered_checkpoint_io.cli.doctor.facts import Check, NodeFacts, Setting, StateSize, Status
from tiered_checkpoint_io.logs import GIB, size_text
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: The size of /dev/shm in containers by default.
DOCKERS_SHM = 64 << 20
#: Connections to S3, mapped files and logs of a few ranks.
_DESCRIPTORS = 1024
_GROUP = "node"


def memory_needed(state: StateSize, config: TieredCheckpointConfig) -> int | None:
    """Bytes that the memory tier takes: the checkpoints that it keeps, one that is being written, and peers' copies."""
    return None if state.size is None else state.size * (config.memory_keep_last + 1) * config.replication_factor


def judge_node(node: NodeFacts, state: StateSize, config: TieredCheckpointConfig) -> list[Check]:
    """One check for each thing that saves need of a node."""
    return [
        _tmpfs(node, state, config),
        _memory(node, state, config),
        _spill(node, state, config),
        _memlock(node, state),
        Check(
            _GROUP,
            "ok" if node.descriptors >= _DESCRIPTORS else "warn",
            "file descriptors",
            f"{node.descriptors} may be open",
            "" if node.descriptors >= _DESCRIPTORS else f"raise the limit: ulimit -n {8 * _DESCRIPTORS}",
        ),
        _cores(node),
        *(_version(name, node) for name in node.supported),
    ]


def _shm_advice(node: NodeFacts, size: int) -> str:
    wanted = f"{max(1, -(-size // GIB))}"
    if node.container == "kubernetes":
        return f"mount an emptyDir with medium: Memory and sizeLimit: {wanted}Gi there, and raise the memory limit too"
    return f"docker run --shm-size={wanted}g; on a host, mount -o remount,size={wanted}g {node.memory_dir}"


def _small(node: NodeFacts, state: StateSize) -> tuple[Status, str]:
    """What it means that memory does not hold one checkpoint: saves fail only where the spill does not, either."""
    # Of an unknown size, it is larger than what Docker gives.
    least = DOCKERS_SHM + 1 if state.size is None else state.size
    has_room = node.spill_free is not None and not node.spill_is_tmpfs and node.spill_free >= least
    return ("warn", f"; saves go through the spill at {node.spill_dir}") if has_room else ("fail", "")


def _tmpfs(node: NodeFacts, state: StateSize, config: TieredCheckpointConfig) -> Check:
    def check(status: Status, measured: str, do: str = "") -> Check:
        return Check(_GROUP, status, "memory tier", f"{node.memory_dir}: {measured}", do)

    if node.memory is None:
        return check("fail", "there is no such folder", "make it, or set memory_dir to a folder on tmpfs")
    kind = "tmpfs" if node.is_tmpfs else "not in memory"
    size, free = size_text(node.memory.size), size_text(node.memory.free)
    measured = f"{kind}, {size}, {free} free"
    if not node.is_writable:
        return check("fail", f"{measured}; this user may not write there", "chmod 1777 it, or set another memory_dir")
    needed = memory_needed(state, config)
    if state.size is not None and state.size > node.memory.size:
        status, spills = _small(node, state)
        measured += f"; one checkpoint takes {size_text(state.size)} ({state.source}){spills}"
        return check(status, measured, _shm_advice(node, needed or 0))
    if needed is not None and needed > node.memory.size:
        measured += f"; {config.memory_keep_last} checkpoints and one being written take {size_text(needed)}"
        return check("warn", measured, _shm_advice(node, needed))
    if state.size is None and node.memory.size <= DOCKERS_SHM:
        advice = _shm_advice(node, 8 * GIB) + " (8 is an example: give --state-size to get yours)"
        status, spills = _small(node, state)
        return check(status, f"{measured}; that is Docker's default, too small for any model{spills}", advice)
    if not node.is_tmpfs:
        return check("warn", f"{measured}: saves are as fast as that disk", "set memory_dir to a folder on tmpfs")
    if needed is not None and needed > node.memory.free:
        return check("warn", f"{measured}; {size_text(needed)} are needed", "tiered-ckpt status shows what lies there")
    return check("ok", measured + (f"; {size_text(needed)} are needed" if needed is not None else ""))


def _memory(node: NodeFacts, state: StateSize, config: TieredCheckpointConfig) -> Check:
    def check(status: Status, do: str = "") -> Check:
        return Check(_GROUP, status, "memory", measured, do)

    measured = f"{size_text(node.machine_memory)}, {size_text(max(0, node.memory_left))} unused"
    if node.memory_limit < node.machine_memory:
        measured += f"; this cgroup may use {size_text(node.memory_limit)}, which pages of tmpfs count against"
    needed = memory_needed(state, config)
    budget = node.memory_limit * config.memory_allocation_percentage // 100
    if needed is not None and needed > budget:
        measured += (
            f"; {config.memory_allocation_percentage} % of it are {size_text(budget)}, needed {size_text(needed)}"
        )
        what = "raise the container's memory limit" if node.memory_limit < node.machine_memory else "take a larger node"
        status: Status = "warn"
        if state.size is not None and state.size > budget:
            status, spills = _small(node, state)
            measured += spills
        return check(status, f"{what}, or keep less there")
    if needed is not None and needed > node.memory_left:
        return check("warn", "other processes leave less than checkpoints need: end them")
    return check("ok")


def _spill(node: NodeFacts, state: StateSize, config: TieredCheckpointConfig) -> Check:
    def check(status: Status, measured: str, do: str = "") -> Check:
        return Check(_GROUP, status, "spill", measured, do)

    if node.spill_dir is None:
        fits = (needed := memory_needed(state, config)) is not None and needed <= _room(node)
        measured = "none: what does not fit into memory is not saved"
        return check("ok" if fits else "warn", measured, "" if fits else "set spill_dir to a folder on node-local disk")
    if node.spill_free is None:
        return check("fail", f"{node.spill_dir} can't be looked at", "set spill_dir to a folder that can be written to")
    measured = f"{node.spill_dir}: {size_text(node.spill_free)} may be used"
    if node.spill_is_tmpfs:
        return check("warn", f"{measured}, in memory", "set spill_dir to a folder on node-local disk")
    if state.size is not None and node.spill_free < state.size:
        return check(
            "warn", f"{measured}; a checkpoint takes {size_text(state.size)}", "set spill_dir to a larger disk"
        )
    return check("ok", measured)


def _room(node: NodeFacts) -> int:
    return node.memory.size if node.memory is not None else 0


def _memlock(node: NodeFacts, state: StateSize) -> Check:
    limit = node.memlock
    measured = "no limit" if limit is None else f"{size_text(limit)} may be locked"
    # CUDA pins by its driver, which asks for no such right; RDMA registers memory by it.
    short = node.has_rdma and limit is not None and limit < max(state.size or 0, GIB)
    do = "ulimit -l unlimited (docker: --ulimit memlock=-1), which InfiniBand and EFA need" if short else ""
    return Check(_GROUP, "warn" if short else "ok", "locked memory", measured, do)


def _cores(node: NodeFacts) -> Check:
    measured = f"{node.cores} cores, {node.numa_nodes} NUMA node{'' if node.numa_nodes == 1 else 's'}"
    few = node.cores < 2
    do = "give the job another core: the drain uploads in a process of its own" if few else ""
    return Check(_GROUP, "warn" if few else "ok", "cores", measured, do)


def _version(name: str, node: NodeFacts) -> Check:
    supported, found = node.supported[name], node.versions.get(name, "")
    try:
        version = Version(found)
    except InvalidVersion:
        do = f"pip install '{name}{supported}'"
        return Check(_GROUP, "fail", name, f"version {found!r}" if found else "not installed", do)
    allowed = SpecifierSet(supported)
    if any(each.operator == "!=" and version == Version(each.version) for each in allowed):
        do = "uninstall it at once; it stole credentials (GHSA-w37p-236h-pfx3): replace those of this machine"
        if name != "lightning":
            do = f"pip install '{name}{supported}'"
        return Check(_GROUP, "fail", name, f"{found} was withdrawn", do)
    if not allowed.contains(version, prereleases=True):
        return Check(_GROUP, "fail", name, f"{found}, supported: {supported}", f"pip install '{name}{supported}'")
    return Check(_GROUP, "ok", name, found)


# ---------------------------------------------------------------------------------------- settings
def recommend_for_node(node: NodeFacts, state: StateSize, config: TieredCheckpointConfig) -> list[Setting]:
    """The settings of the memory tier that should differ from what they are."""
    settings: list[Setting] = []
    size = node.memory.size if node.memory is not None else 0
    needed = memory_needed(state, config)
    best = max(node.other_tmpfs, key=lambda each: each.free, default=None)
    wanted = needed if needed is not None else DOCKERS_SHM + 1
    if best is not None and (size < wanted or not node.is_tmpfs) and best.free >= wanted:
        reason = f"tmpfs with {size_text(best.free)} free; {node.memory_dir} does not hold what is kept"
        settings.append(Setting("memory_dir", best.path, reason))
        size = best.size
    if state.size is None or needed is None:
        return settings
    budget = min(size, node.memory_limit)
    share = -(-needed * 100 // max(1, node.memory_limit))
    if needed <= budget and config.memory_allocation_percentage < share <= _MAX_SHARE:
        limit = size_text(node.memory_limit)
        text = f"{size_text(needed)} of {limit} are needed for {config.memory_keep_last + 1} checkpoints"
        settings.append(Setting("memory_allocation_percentage", share, text))
    elif needed > min(size, node.memory_limit * _MAX_SHARE // 100) >= state.size * 2 and config.memory_keep_last > 1:
        text = f"memory holds two checkpoints of {size_text(state.size)}: one that is kept, and one being written"
        settings.append(Setting("memory_keep_last", 1, text))
    return settings


#: Per cent: training itself needs memory, too.
_MAX_SHARE = 80
