"""One way to save a state, in a process of its own: how long training waits, until the bytes are safe, and a load.

What is measured goes out as one line of JSON: seconds a round of a copy into warm tensors, of the blocking part of
the save (``stall``), until it is where it shall be (``done``), and of the load; the peak of anonymous memory, bytes
on tmpfs, and what the S3 server was asked. A library that is absent, or that refuses this torch or a machine without a
GPU, gives ``error``. Of ours, ``parts`` has the seconds in what a save consists of.

Peers run in environments of their own: see ``peers.py``, which names them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS
from measure import MIB, measure
from parts import Parts, medians
from s3_process import StoringServer
from states import STATES, all_tensors, train

WARM_ROUNDS = 3
#: Seconds after each of these, as between two saves of a training: background work of the save before ends meanwhile.
PAUSE_S = 2.0


def used_of(folder: str) -> int:
    """Bytes that files below a folder take."""
    found = 0
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512 if path.is_file() else 0
    return found


def hashing_s(contender: Any, state: Any, parts: Parts, number: int) -> float:
    """Returns the seconds that hashing adds to a copy: by turns with saves that hash later."""
    longer = []
    for turn in range(1, 1 + 2 * WARM_ROUNDS, 2):
        filled = []
        for later in (contender.hashing_later(), contextlib.nullcontext()):
            parts.restart()
            with later:
                contender.save(state, number + turn + len(filled))
            contender.finish()
            filled.append(parts.seconds["copying and hashing"])
        longer.append(filled[1] - filled[0])
    return max(0.0, statistics.median(longer))


def run(name: str, state_name: str, mebibytes: int, rounds: int, folder: str) -> dict[str, Any]:
    """Returns one contender's figures for one state."""
    state = STATES[state_name](mebibytes)
    sources = all_tensors(state)
    found: dict[str, Any] = {"contender": name, "state": state_name, "tensors": len(sources)}
    found["MiB"] = sum(tensor.nbytes for tensor in sources) / MIB
    targets = [tensor.clone() for tensor in sources]
    series: dict[str, list[float]] = {
        key: [] for key in ("memcpy", "stall", "done", "cpu", "peak", "bytes", "requests")
    }
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StoringServer())
        contender = CONTENDERS[name](folder, server.url)
        # For all rounds: a class that has just been changed is slow, as all is looked up anew.
        parts = stack.enter_context(Parts(contender.functions))
        rounds_of_parts: list[dict[str, float]] = []
        for number in range(1, rounds + WARM_ROUNDS + 1):
            if state_name == "LoRA":
                train(state)
            with measure() as copied:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
            before = server.figures()
            began = time.perf_counter()
            # One round looks at memory, and not at time: looking takes time.
            is_last = number == rounds + WARM_ROUNDS
            with measure(memory=is_last) as taken:
                parts.restart()
                with measure() as blocked:
                    contender.save(state, number)
                contender.finish()
            after = server.figures()
            figures = {"memcpy": copied.seconds, "stall": blocked.seconds, "done": time.perf_counter() - began}
            figures |= {"cpu": taken.cpu_s, "peak": taken.peak_MiB}
            figures |= {key: after[key] - before[key] for key in ("bytes", "requests")}
            for key, value in figures.items():
                series[key].append(value)
            rounds_of_parts.append({**parts.seconds, "the rest": blocked.seconds - sum(parts.seconds.values())})
            if is_last:
                found["tmpfs_MiB"] = used_of(folder) / MIB
                with contextlib.suppress(NotImplementedError), measure() as loaded:
                    contender.load(number, state)
                    found["load"] = -1.0
                if "load" in found:
                    found["load"] = loaded.seconds
            contender.clean(number)
            if number <= WARM_ROUNDS:
                time.sleep(PAUSE_S)
        if parts.seconds:
            found["parts"] = medians(rounds_of_parts[WARM_ROUNDS:])
            found["hashing_s"] = hashing_s(contender, state, parts, number)
        contender.close()
    found["peak_MiB"], found["where"] = series.pop("peak")[-1], contender.where
    return found | {key: values[WARM_ROUNDS:] for key, values in series.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("state", choices=STATES)
    parser.add_argument("folder")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # A copy by several threads waits for the slowest, which on a busy machine says little.
    torch.set_num_threads(1)
    # Libraries write to standard output what they like.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        found = run(options.contender, options.state, options.mebibytes, options.rounds, options.folder)
    except ImportError as error:
        found = {"contender": options.contender, "state": options.state, "error": f"it is not installed: {error}"}
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        why = CONTENDERS[options.contender].reason or f"{type(error).__name__}: {first[0]}"
        found = {"contender": options.contender, "state": options.state, "error": why}
    os.write(out, (json.dumps(found) + "\n").encode())
    # Background processes of some libraries would be waited for, and would hold this one's output open.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
