"""Does the simulation find what it is there to find? Each defect is put into a copy of the package, and lives are run.

    make test-sim-defects                             all
    python tests/sim/defects.py alias               those whose description holds a text

Prints the first seed that finds each, and fails if one is not found within the seeds that ``make test-sim`` runs.
"""

import contextlib
import multiprocessing.pool
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: For one defect, on one of two busy cores, seconds.
PATIENCE_S = 900
COMMIT, SWEEP = (f"engine/durable/{name}.py" for name in ("commit", "sweep"))
LEASES = "engine/leasing.py"
AGREEMENT = "engine/replication/agreement.py"
RETENTION = "engine/retention.py"
OPERATIONS, DRAIN = "engine/drain/operations.py", "engine/drain/worker.py"
#: Defect; file; the text, and the text that replaces it.
DEFECTS = [
    (
        "an overwrite does not keep the old content beside the new while the switch changes (W4)",
        COMMIT,
        "        if tag is not None:\n            Section(journal, _HELD)",
        "        if False:\n            Section(journal, _HELD)",
    ),
    (
        "the old files go before the manifest stops naming them (W7 before W6)",
        COMMIT,
        "    manifests.put(replace(new, reserved=manifests.reserved(part.name)))\n    remains.remove(store)\n",
        "    remains.remove(store)\n    manifests.put(replace(new, reserved=manifests.reserved(part.name)))\n",
    ),
    (
        "a commit that was cut off between W4 and W5 is taken for done",
        COMMIT,
        "manifest.alias_of is not None or manifest.previous:",
        "manifest.alias_of is not None:",
    ),
    (
        "the manifest is written before the switch",
        COMMIT,
        "        _switch_over(",
        "        manifests.put(new)\n        _switch_over(",
    ),
    (
        "a delete removes files without a look at what a later save has put there",
        SWEEP,
        "conditional(store).delete_if(path, tag)",
        "store.delete(path)",
    ),
    (
        "the drain of a node without the coordinator does not show that its save is alive",
        DRAIN,
        "                        live[save_id] = part.place\n",
        "                        continue\n",
    ),
    (
        "a sweep removes whatever has no manifest, however new",
        SWEEP,
        ">= before]",
        ">= before + 1e9]",
    ),
    (
        "an alias overtakes a queued save of its own name",
        OPERATIONS,
        "is_blocked |= bool(names & (busy | saving))",
        "is_blocked |= bool(names & busy or (operation.place, operation.target) in saving)",
    ),
    (
        "a delete is carried out though the save that it follows was given up",
        DRAIN,
        "if not delete.target or (followed is not None",
        "if True or (followed is not None",
    ),
    (
        "a run does not notice that another has taken its lease for a dead one's",
        LEASES,
        'self._refuse(f"{lease.who} took over while this run did not answer")',
        "pass",
    ),
    (
        "a dead process of the same machine passes for a live one",
        "memory/node.py",
        "return _born(self.pid) == self.born",
        "return True",
    ),
    (
        "what a run saves after another has come by keeps its place in the order",
        "engine/staging.py",
        " and self._met_others():",
        " and False:",
    ),
    (
        "a restart takes what memory has, and does not look whether the durable tier has a newer one",
        "engine/restore/search.py",
        "            options = self._untried(catalog)",
        "            options = self._untried(self._catalog()) or self._untried(catalog)",
    ),
    (
        "the ids of a run follow its machine's clock alone",
        "engine/staging.py",
        "ids.new_run_id(after=max(filter(None, seen), default=None), clock=self._clock)",
        "ids.new_run_id(clock=self._clock)",
    ),
    (
        "a restart takes what training can't resume from",
        "engine/restore/choice.py",
        'return content.resumable or self.kind == "name"',
        "return True",
    ),
    (
        "retention frees what is not durable yet",
        RETENTION,
        "if rules.may_remove(each) and not each.pending]",
        "if rules.may_remove(each)]",
    ),
    (
        "a save is reported durable before it is",
        "engine/save/saver.py",
        "        if self.op_id is None:",
        "        if True:",
    ),
    (
        "a preempted run waits for the drain beyond its time",
        "engine/drain/client.py",
        "deadline if self.leave_by is None else min(deadline, self.leave_by)",
        "deadline",
    ),
    (
        "a part counts as replicated on its own node alone",
        AGREEMENT,
        "sum(len(there) >= self._group.factor for",
        "sum(len(there) >= 1 for",
    ),
    (
        "a replica whose bytes differ from their hash is kept",
        "engine/chunks.py",
        "    entry.check_digest(index, digest.hexdigest(), tier=tier_of(store)",
        "    entry if digest else entry.check_digest(index, digest.hexdigest(), tier=tier_of(store)",
    ),
    (
        "a part counts on a node that may be removing it",
        AGREEMENT,
        "if held.save_id == save_id and held.is_kept:",
        "if held.save_id == save_id:",
    ),
    (
        "a save is marked as replicated once one of its parts is",
        AGREEMENT,
        "for there in copies.values()) == of",
        "for there in copies.values()) >= 1",
    ),
    (
        "a node that has lost its memory gets nothing until the next save",
        AGREEMENT,
        ", *self._replicated.values()]",
        "]",
    ),
    (
        "a rank removes its part of a save that may become replicated, or is",
        RETENTION,
        "if each.save_id not in rules.retained]",
        "if each]",
    ),
]


def seed_that_finds(where, text, instead, folder):
    """The first seed with a violation in a copy of the package with a defect; None if none has."""
    shutil.copytree(ROOT / "tiered_checkpoint_io", folder / "tiered_checkpoint_io")
    path = folder / "tiered_checkpoint_io" / where
    source = path.read_text()
    assert source.count(text) == 1, f"{where} has no such line any more: {text}"
    path.write_text(source.replace(text, instead))
    memory = folder / "memory"
    memory.mkdir()
    command = [sys.executable, str(ROOT / "tests" / "sim" / "run.py"), "--first-found", "--jobs", "1"]
    command += ["--memory", str(memory)]
    # No other life has replicas.
    command += ["--only", "peers"] if where.startswith("engine/replication/") else []
    env = {**os.environ, "PYTHONPATH": str(folder)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=env, **options) as process:
        try:
            said, errors = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its own process as well: with a defect, a life may be without an end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = [line for line in said.splitlines() if line.startswith("seed ")]
    assert found or "violations=0" in said, errors
    return found[0] if found else None


def looked_for(defect):
    """Returns a line about a defect, and True if the defect was found."""
    what, *change = defect
    began = time.monotonic()
    # On tmpfs, as the memory of nodes.
    with tempfile.TemporaryDirectory(prefix="tiered-defect-", dir="/dev/shm") as folder:
        found = seed_that_finds(*change, Path(folder))
    return f"{what}\n    {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", found is not None


def main():
    missed, only = 0, sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [defect for defect in DEFECTS if only in defect[0]]
    # Two at once, each by one process of its own.
    with multiprocessing.pool.ThreadPool(2) as pool:
        for text, is_found in pool.imap_unordered(looked_for, chosen):
            missed += not is_found
            print(text, flush=True)
    print(f"defects={len(chosen)} missed={missed}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
