"""Names of checkpoints: rules for names, the step in a name, and the common series of a job's names."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.ids.keys import MANIFEST_SUFFIX, META_PREFIX
from tiered_checkpoint_io.model.ids.urls import (
    SENTINELS,
    SURROGATE,
    StrPath,
    at_home,
    build_s3_url,
    is_s3_url,
    normalize_dirpath,
    parse_s3_url,
    text_of,
    url_scheme,
)

#: The small file in which Lightning's strategies save loops, callbacks and hyperparameters, next to the shards.
REST = "meta.pt"
#: The suffix of the file in which NeMo saves averaged weights, before each checkpoint and next to it.
EMA = "-EMA"
_REST = re.compile(r"meta(?:-[0-9a-f]{8})?\.pt\Z")
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+\Z")
_STEP_IN_NAME = re.compile(r"(?:^|[^A-Za-z])step[=_-](?P<step>\d+)")
_COUNTED = re.compile(r"(?P<what>(?:^|(?<=[^A-Za-z]))(?:step|epoch)[=_-])\d+")
#: A number that may be the step, by the word before it. Other numbers may be of process groups, or of a model.
_OF_STEP = re.compile(
    r"(?P<word>(?:^|(?<=[^A-Za-z]))(?:step|iter|iteration|ckpt|checkpoint)[=_-]?)(?P<number>\d+)(?!\.?\d)",
    re.IGNORECASE,
)
#: A metric, in the form that ModelCheckpoint writes into the name of a file.
_MEASURED = re.compile(r"(?<==)-?\d+\.\d+(?:e[+-]?\d+)?(?=[^/]*\Z)")
_STEP_HINT = "give a step, or a checkpoint_id that holds step_N, such as 'step_42' or '/path/step_100/checkpoint'"
#: Control characters.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_COMPONENTS = {"", ".", ".."}
_LAST = re.compile(r"(?:^|[/_-])last(?:-v\d+)?(?:\.[^/.]*)?\Z")
#: A file system allows 255 bytes for one component; the manifest's key adds its suffix.
_MAX_COMPONENT_BYTES = 255 - len(MANIFEST_SUFFIX)
#: S3 allows 1,024 bytes for a key; the rest is room for the prefix and our own folders.
_MAX_NAME_BYTES = 700
_MAX_NAMESPACE = 128
#: Asks for a namespace that is made from dirpath.
AUTO_NAMESPACE = "auto"
#: Characters of dirpath in such a namespace.
_SLUG = 40
#: No manifest can hold more.
_MAX_STEP = 1 << 62


def known(number: int) -> int | None:
    """Returns a step or epoch for people and programs: None if it is below 0, which is how an unknown one is stored."""
    return number if number >= 0 else None


def validate_name(name: str) -> str:
    """Checks and returns a checkpoint's name: a relative path that does not leave its folder.

    Raises:
        ConfigError: Empty, absolute, leaves its folder (``..``), reserved, or too long.
    """
    problem: str | None = None
    parts, is_printable = name.split("/"), name.isprintable()
    # Asked at each save: no check loops over the characters.
    if not name:
        problem = "is empty"
    elif "\\" in name or (not is_printable and _CONTROL.search(name)):
        problem = "has control characters or a backslash"
    elif name.startswith("/") or url_scheme(name) is not None:
        problem = "is not relative to dirpath"
    elif not _NO_COMPONENTS.isdisjoint(parts):
        problem = "has an empty, '.' or '..' component"
    elif parts[0] == META_PREFIX.rstrip("/"):
        problem = f"lies in the reserved folder {META_PREFIX!r}"
    elif not is_printable and SURROGATE.search(name):
        problem = "is not valid Unicode"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        problem = f"is longer than {_MAX_NAME_BYTES} bytes"
    elif len(name) * 4 > _MAX_COMPONENT_BYTES and max(map(len, map(str.encode, parts))) > _MAX_COMPONENT_BYTES:
        problem = f"has a component of more than {_MAX_COMPONENT_BYTES} bytes"
    if problem:
        raise ConfigError(
            f"checkpoint name {name!r} {problem}",
            hint="use a path relative to dirpath, such as 'epoch=0-step=500.ckpt'",
        )
    return name


def validate_new_name(name: str) -> str:
    """Does :func:`validate_name`; also refuses new names that read as sentinels, such as ``tiered:latest``."""
    if name.startswith(f"{SENTINELS}:"):
        raise ConfigError(
            f"checkpoint name {name!r} begins with {SENTINELS + ':'!r}, as what stands for a choice of checkpoint does",
            operation="save",
            hint="give it another name",
        )
    return validate_name(name)


def name_in(dirpath: str, path: StrPath) -> str:
    """Returns the name of the checkpoint at ``path``: a path or URL below ``dirpath`` (normalized), or a name.

    Raises:
        ConfigError: Outside ``dirpath``, or not a valid name.
    """
    text = at_home(text_of(path).rstrip("/"))
    root = dirpath.rstrip("/")
    scheme = url_scheme(text)
    if scheme == SENTINELS:
        raise ConfigError(
            f"{text!r} is not the name of a checkpoint", hint="give a name, or a path or URL below dirpath"
        )
    if scheme is None and not os.path.isabs(text):
        return validate_name(text.removeprefix("./"))
    full, (above, _, last) = text, text.rpartition("/")
    if scheme in (None, "file", "local") and not text.startswith(root + "/"):
        full = f"{normalize_dirpath(above or '/').rstrip('/')}/{last}"
    # ".." must be refused, not resolved: a name is the path below dirpath.
    if ".." in text.split("/") or not full.startswith(root + "/"):
        raise ConfigError(
            f"checkpoint path {text!r} is not below dirpath {dirpath!r}",
            hint="give a path below dirpath, or configure another dirpath",
        )
    return validate_name(full[len(root) + 1 :])


def step_in_name(name: str) -> int | None:
    """Returns the step in a name: 500 for ``epoch=0-step=500.ckpt`` and ``step_500``; else None."""
    matches = list(_STEP_IN_NAME.finditer(name))
    step = int(matches[-1]["step"]) if matches else None
    return step if step is not None and step < _MAX_STEP else None


def companion_of(name: str, suffix: str) -> str:
    """Returns the name, path or URL of a checkpoint's companion: ``x-EMA.ckpt`` for ``x.ckpt`` and ``-EMA``."""
    stem, dot, extension = name.rpartition(".")
    return f"{stem}{suffix}.{extension}" if dot and "/" not in extension else name + suffix


def is_companion(name: str, suffix: str) -> bool:
    """Returns True if :func:`companion_of` returns names like this one."""
    return without_companion(name, suffix) != name


def without_companion(name: str, suffix: str) -> str:
    """Returns the name from which :func:`companion_of` made this one; any other name as it is."""
    stem, dot, extension = name.rpartition(".")
    if not dot or "/" in extension:
        return name.removesuffix(suffix)
    return f"{stem.removesuffix(suffix)}.{extension}"


def series_of(name: str, step: int = -1) -> str:
    """Returns the common part of one job's checkpoint names: without the numbers of step and epoch, and metrics.

    The number of ``checkpoint-100``, and of other words for a step, goes too if it is the ``step`` of the save (-1 if
    unknown). Process groups that save side by side (``tp0/step_5``, ``tp1/step_5``) are series of their own.
    """

    def without_step(match: re.Match[str]) -> str:
        return f"{match['word']}#" if int(match["number"]) == step else match[0]

    return _MEASURED.sub("#", _COUNTED.sub(r"\g<what>#", _OF_STEP.sub(without_step, name)))


class Split(NamedTuple):
    """A durable tier, and the name of a file there."""

    dirpath: str
    name: str


def splits(url: str) -> list[Split]:
    """Returns the possible dirpaths of the run that saved a file, and the file's name there: the nearest first."""
    scheme = url_scheme(url)
    if is_s3_url(url):
        # An access point has slashes of its own.
        bucket, rest = parse_s3_url(url)
        root = build_s3_url(bucket)
    else:
        head = f"{scheme}://" if scheme is not None else "/"
        first, _, rest = url[len(head) :].partition("/")
        root = head + first
    folders = rest.split("/")
    found = []
    for at in range(len(folders) - 1, -1, -1):
        with contextlib.suppress(ConfigError):
            found.append(Split("/".join([root, *folders[:at]]), validate_name("/".join(folders[at:]))))
    return found


def form_of(name: str) -> str:
    """Returns the series of a name, without knowledge of its checkpoint."""
    told = step_in_name(name)
    return series_of(name, -1 if told is None else told)


def folder_of(name: str) -> str:
    """Returns a name's folder, with ``#`` for the parts that :func:`series_of` leaves out; empty without one."""
    return form_of(name).rpartition("/")[0]


class Located(NamedTuple):
    """Checkpoint that a caller means."""

    dirpath: str
    name: str
    step: int


def locate(dirpath: str, path: StrPath | None, step: int | None) -> Located:
    """Returns the sharded checkpoint that a ``checkpoint_id`` and a step mean together.

    An explicit step wins over the step in a path, and appears in the name: ``step_5`` with step 7 is ``step_7``, and
    ``some/path`` with step 7 is ``some/path/step_7``. Of an absolute path outside a remote dirpath, only the step is
    used. Without a path, the name is ``step_<step>``.

    Raises:
        ConfigError: No step is known, or it is below 0, or the name is not valid.
    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP):
        raise ConfigError(f"Invalid step value: {step!r}", hint="a step is a whole number from 0 on, below 2^62")
    if path is None or not text_of(path):
        if step is None:
            raise ConfigError("Invalid step value: none is given", hint=_STEP_HINT)
        return Located(dirpath, f"step_{step}", step)
    text = text_of(path).rstrip("/")
    scheme = url_scheme(text)
    if scheme is None and not os.path.isabs(text):
        name = name_in(dirpath, text)
    else:
        try:
            name = name_in(dirpath, text)
        except ConfigError:
            told = step_in_name(text)
            if scheme is None and url_scheme(dirpath) is not None:
                if step is None and told is None:
                    raise
                name = f"step_{told if step is None else step}"
            else:
                parent, _, last = text.rpartition("/")
                if ".." in text.split("/") or not parent or parent.endswith(":/"):
                    raise
                dirpath, name = normalize_dirpath(parent), validate_name(last)
    told = step_in_name(name)
    if step is None:
        return Located(dirpath, name, -1 if told is None else told)
    if told is None:
        name = validate_name(f"{name}/step_{step}")
    elif told != step:
        match = list(_STEP_IN_NAME.finditer(name))[-1]
        name = f"{name[: match.start('step')]}{step}{name[match.end('step') :]}"
    return Located(dirpath, name, step)


def is_last(name: str) -> bool:
    """Returns True if a callback called this checkpoint "last": ``last.ckpt``, ``last-v1.ckpt``, ``x-last.ckpt``."""
    return _LAST.search(name) is not None


@functools.lru_cache(maxsize=16)
def namespace_of(dirpath: str) -> str:
    """Returns the default namespace of a job: the last two parts of its dirpath, and a hash of the dirpath.

    ``s3://bucket/exp/run-1`` gives ``exp-run-1-`` and eight digits. All nodes and all starts have the same.
    """
    last = "/".join(dirpath.rpartition("://")[2].strip("/").split("/")[-2:])
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", last).strip("-")
    digest = hashlib.blake2b(dirpath.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    return f"{slug[-_SLUG:]}-{digest}".lstrip("-")


def validate_namespace(namespace: str) -> str:
    """Returns a namespace; raises ConfigError if it is empty, too long, or has other characters."""
    if not isinstance(namespace, str) or not _NAMESPACE.match(namespace) or len(namespace) > _MAX_NAMESPACE:
        raise ConfigError(
            f"invalid namespace {namespace!r}",
            hint=f"allowed: 1 to {_MAX_NAMESPACE} letters, digits, '_' and '-'",
        )
    return namespace


def rest_in(basenames: Iterable[str]) -> str | None:
    """Returns the small file of a sharded checkpoint, see :data:`REST`; None if there is none.

    Its name may have a save's mark, as in ``meta-0123abcd.pt``.
    """
    return next((each for each in sorted(basenames) if _REST.match(each)), None)
