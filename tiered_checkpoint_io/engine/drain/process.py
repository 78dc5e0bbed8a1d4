"""The process of a drain, as a trainer starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

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
#: Variables that name one file or folder: what S3 and fsspec's packages are reached by.
_FILES = (
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_LOGIN_CACHE_DIRECTORY",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "CURL_CA_BUNDLE",
    "FSSPEC_CONFIG_DIR",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)
#: Variables that list folders, of which an empty one is the current folder.
_FOLDERS = ("AWS_DATA_PATH", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SSL_CERT_DIR")
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


def elsewhere() -> dict[str, str]:
    """This process' environment for one in another folder: what is named relatively is named from here."""
    found = dict(os.environ)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # The folder is gone, and with it all that is named from it.
        return found
    for name in _FILES:
        if found.get(name):
            found[name] = _from(here, found[name])
    for name in _FOLDERS:
        if found.get(name):
            found[name] = os.pathsep.join(_from(here, each) for each in found[name].split(os.pathsep))
    return found


def module_path() -> list[str]:
    """Where this process looks for modules, for one in another folder."""
    found = [each for each in sys.path if isinstance(each, str)]
    with contextlib.suppress(FileNotFoundError):
        here = os.getcwd()
        # What is no file or folder is a word of installers', and stays one.
        found = [path if os.path.exists(path := os.path.join(here, each)) else each for each in found]
    # A folder put first would hide what this process had imported before that.
    standard = os.path.dirname(os.__file__)
    return sorted(found, key=lambda each: each not in (standard, os.path.join(standard, "lib-dynload")))


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


def _from(folder: str, path: str) -> str:
    # What boto3 expands is left to it.
    if os.path.isabs(os.path.expandvars(os.path.expanduser(path))):
        return path
    return os.path.join(folder, path) if path else folder
