"""The process of a drain, as a trainer starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from tiered_checkpoint_io.engine.drain.environment import elsewhere, module_path
from tiered_checkpoint_io.engine.drain.report import LOG
from tiered_checkpoint_io.logs import Logger

#: The arguments of the command; the root is last. See ``standalone.py``.
FOR_TRAINER = ["drain", "--for-trainer", "--root"]
#: The status of one that can't import what it needs: no other would.
CANNOT_IMPORT = 3
#: It runs the code of this package that its trainer runs, whatever else is installed, and looks for all other modules
#: where its trainer does. The package is loaded from its own place: that, put first, might hide the standard library.
_CODE = """\
# tiered_checkpoint_io drain, of a trainer
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
sys.path[:] = {path}
try:
    spec = PathFinder.find_spec("tiered_checkpoint_io", [{place}])
    if spec is None:
        raise ImportError("tiered_checkpoint_io is no longer at " + {place})
    sys.modules[spec.name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    from tiered_checkpoint_io.__main__ import main
    main()
except ImportError as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit({status})
"""
#: Where this package is.
_PLACE = Path(__file__).absolute().parents[3]
#: Those that this process has started, and that may outlive their handle: reaped when they have ended.
_children: list[subprocess.Popen[bytes]] = []


def start_process(root: Path, log: Logger) -> subprocess.Popen[bytes]:
    """Starts a drain over a memory tier's root, in this process' environment; it may find that another one works."""
    reap()
    # In ASCII: a path may hold bytes that are no text.
    code = _CODE.format(path=ascii(module_path()), place=ascii(str(_PLACE)), status=CANNOT_IMPORT)
    with _open_log(root, log) as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *FOR_TRAINER, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # Launchers kill the process group of their workers; the drain has work to finish.
            start_new_session=True,
            cwd="/",
            env=elsewhere(),
        )
    _children.append(child)
    return child


def reap() -> None:
    """Forgets those that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


def _open_log(root: Path, log: Logger) -> BinaryIO:
    path = root / LOG
    try:
        return open(path, "ab")
    except OSError as error:
        # No space for one more file: that must not keep the drain from its work.
        log.warning("the drain has no log: %s: %s", path, error.strerror)
        return open(os.devnull, "ab")
