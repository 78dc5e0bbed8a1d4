"""The environment of a drain's process: the trainer's, for a process in another folder, and whether it still is.

The drain announces a fingerprint of it, and of this package's code. A trainer that finds another one starts a drain of
its own, which asks the old one to leave. The configuration is no part of it: a drain reads that anew when it changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

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

_PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
#: Besides those of AWS, variables by which a store is reached, or credentials are found.
_RELEVANT = {*_FILES, *_PROXIES, *(name.lower() for name in _PROXIES), "HOME", "SSL_CERT_DIR"}


def _code() -> str:
    """Which code of this package a process runs: a hash of where it is, and of its files' names, sizes and times.

    Not the release: an installation from a clone, or one that is edited, changes without it.
    """
    package = os.path.realpath(Path(__file__).parents[2])
    found = []
    # callbacks and configs may be links.
    for folder, _, names in os.walk(package, followlinks=True):
        if not folder.endswith("__pycache__"):
            found += [os.path.join(folder, name) for name in names if name.endswith((".py", ".pyc"))]
    # In a zip archive there are no files: then it is the archive itself.
    found = found or [str(each) for each in Path(package).parents if each.is_file()]
    facts: list[object] = [package]
    for path in sorted(found):
        # One may just be removed, or out of reach.
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            facts.append([path, stat.st_size, stat.st_mtime_ns])
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


#: Of this process: taken at once, as what changes later is not what it runs.
_CODE = _code()


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


def announcement(salt: str) -> dict[str, str]:
    """What a drain says of itself: a name of its own, and a fingerprint of the environment that it works in."""
    return {"salt": salt, "fingerprint": _fingerprint(salt, os.environ)}


def differs(said: Mapping[str, str], environment: Mapping[str, str]) -> bool:
    """Whether a drain has said that it works in another environment than is given here, or by other code than ours."""
    return bool(said) and said.get("fingerprint") != _fingerprint(said.get("salt", ""), environment)


def _fingerprint(salt: str, environment: Mapping[str, str]) -> str:
    # A hash alone, and by a salt that stays in the node's memory: there are secrets among what goes into it.
    relevant = {name: value for name, value in environment.items() if name.startswith("AWS_") or name in _RELEVANT}
    facts = json.dumps([salt, _CODE, sorted(relevant.items())])
    return hashlib.blake2b(facts.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _from(folder: str, path: str) -> str:
    # What boto3 expands is left to it.
    if os.path.isabs(os.path.expandvars(os.path.expanduser(path))):
        return path
    return os.path.join(folder, path) if path else folder
