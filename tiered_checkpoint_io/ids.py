"""The only place where a name, step, key, id or URL is formatted or parsed.

No dependency beyond the standard library, so that ``is_s3_url`` and its kin can be used anywhere.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from datetime import datetime, timedelta, timezone
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

from tiered_checkpoint_io.errors import InvalidNameError
from tiered_checkpoint_io.secrecy import holds_secrets

#: What a user passes as ``ckpt_path`` to resume from the newest intact checkpoint, or from scratch.
LATEST = "tiered:latest"
#: The same for the newest checkpoint that a callback called "last"; used by ``ckpt_path="last"``.
LAST = "tiered:last"
#: As a URL: Lightning asks the file system of what it resolves "last" to.
LAST_URL = "tiered://last"
#: The checkpoint whose monitored value is the best: ``tiered://best?mode=min&monitor=val_loss``.
_BEST_URL = "tiered://best"

#: Everything that is ours on the durable tier, besides the checkpoints themselves, lies below this.
META_PREFIX = ".tiered/"
MANIFEST_PREFIX = META_PREFIX + "manifests/"
PART_PREFIX = META_PREFIX + "parts/"
LEASE_PREFIX = META_PREFIX + "leases/"

_MANIFEST_SUFFIX = ".json"
_PART_SUFFIX = ".json"
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+\Z")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)\Z", re.DOTALL)
#: ``Path("s3://bucket/key")`` has lost a slash when it becomes text again.
_MANGLED_S3 = re.compile(r"s3:/(?!/)")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
_STEP_IN_NAME = re.compile(r"(?:^|[^A-Za-z])step[=_-](?P<step>\d+)")
_COUNTED = re.compile(r"(?P<what>(?:^|(?<=[^A-Za-z]))(?:step|epoch)[=_-])\d+")
_STEP_HINT = "give a step, or a checkpoint_id that holds step_N, such as 'step_42' or '/path/step_100/checkpoint'"
_LAST = re.compile(r"(?:^|[/_-])last(?:-v\d+)?(?:\.[^/.]*)?\Z")
#: A file system allows 255 bytes for one component; the manifest's key adds its suffix.
_MAX_COMPONENT_BYTES = 255 - len(_MANIFEST_SUFFIX)
#: S3 allows 1,024 bytes for a key; the rest is room for the prefix and our own folders.
_MAX_NAME_BYTES = 700
_MAX_NAMESPACE = 128

StrPath = str | os.PathLike[str]


# --------------------------------------------------------------------------------------- S3 URLs
def _text(path: StrPath) -> str:
    text = os.fspath(path)
    return _MANGLED_S3.sub("s3://", text, count=1) if text.startswith("s3:") else text


def is_s3_url(path: StrPath) -> bool:
    """Whether ``path`` (text or ``Path``, whose lost slash is forgiven) is an ``s3://`` URL."""
    return _text(path).startswith("s3://")


def build_s3_url(bucket: str, key: str = "") -> str:
    """``("b", "x/y")`` gives ``"s3://b/x/y"``; without a key, ``"s3://b"``.

    Raises:
        InvalidNameError: The bucket's name is empty or not one that S3 allows.
    """
    if not _BUCKET.match(bucket):
        raise InvalidNameError(
            f"invalid S3 bucket name {bucket!r}",
            hint="a bucket's name has 2-255 letters, digits, '.', '_' or '-'",
        )
    key = key.lstrip("/")
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


def parse_s3_url(url: StrPath) -> tuple[str, str]:
    """``"s3://b/x/y"`` gives ``("b", "x/y")``; without a key, ``("b", "")``.

    Raises:
        InvalidNameError: Not an S3 URL, or one without a bucket.
    """
    text = _text(url)
    if not text.startswith("s3://"):
        raise InvalidNameError(f"not an S3 URL: {text!r}", hint="it must look like s3://bucket/prefix")
    bucket, _, key = text[len("s3://") :].partition("/")
    if not bucket:
        raise InvalidNameError(f"S3 URL without a bucket: {text!r}", hint="it must look like s3://bucket/prefix")
    build_s3_url(bucket)
    return bucket, key


# ---------------------------------------------------------------------------------------- dirpath
def url_scheme(path: StrPath) -> str | None:
    """The scheme of a URL (``"s3"``, ``"gs"``, ``"memory"`` ...); None for a local path."""
    match = _URL.match(_text(path))
    return match["scheme"].lower() if match else None


def normalize_dirpath(dirpath: StrPath) -> str:
    """One spelling for a durable tier's root: URL or absolute local path, no trailing slash.

    Raises:
        InvalidNameError: Empty, an S3 URL without a bucket, or a URL with a password or key in it: the drain's
            queue and the descriptions of parts would have to hold that.
    """
    text = _text(dirpath)
    if holds_secrets(text):
        raise InvalidNameError(
            "the URL holds a password, key or token",
            hint="give credentials to boto3's ordinary chain, or to fsspec's configuration (FSSPEC_<SCHEME>_<NAME>)",
        )
    if not text.strip():
        raise InvalidNameError("dirpath is empty", hint="give an S3 URL, another fsspec URL, or a directory")
    scheme = url_scheme(text)
    if scheme == "s3":
        bucket, key = parse_s3_url(text)
        return build_s3_url(bucket, key.strip("/"))
    if scheme in ("file", "local"):
        text = text.split("://", 1)[1]
    elif scheme is not None:
        return text if text.endswith("://") else text.rstrip("/")
    return os.path.abspath(text)


def join_url(dirpath: str, name: str) -> str:
    """The full path of a checkpoint: what Lightning shows as ``best_model_path``."""
    return f"{dirpath.rstrip('/')}/{name}" if not dirpath.endswith("://") else dirpath + name


# -------------------------------------------------------------------------------------- sentinels
def best_url(monitor: str | None, mode: str) -> str:
    """The URL that loads the checkpoint whose ``monitor`` is the best; ``mode`` is ``min`` or ``max``."""
    return f"{_BEST_URL}?{urlencode({'mode': mode, 'monitor': monitor or ''})}"


def parse_best_url(text: str) -> tuple[str, Literal["min", "max"]] | None:
    """The monitor and the mode of a :func:`best_url`; None for any other text.

    Raises:
        InvalidNameError: It begins like one, but is none.
    """
    head, _, query = text.partition("?")
    if head != _BEST_URL:
        return None
    facts = dict(parse_qsl(query, keep_blank_values=True))
    if set(facts) != {"mode", "monitor"} or facts["mode"] not in ("min", "max"):
        raise InvalidNameError(
            f"not a sentinel: {text!r}", hint="it must look like tiered://best?mode=min&monitor=loss"
        )
    return facts["monitor"], "max" if facts["mode"] == "max" else "min"


# ------------------------------------------------------------------------------- names and steps
def validate_name(name: str) -> str:
    """A checkpoint's name: a relative path that stays where it is put.

    Raises:
        InvalidNameError: Empty, absolute, leaves its folder (``..``), reserved, or too long.
    """
    problem: str | None = None
    parts = name.split("/")
    if not name:
        problem = "is empty"
    elif any(ord(char) < 32 or ord(char) == 127 for char in name) or "\\" in name:
        problem = "has control characters or a backslash"
    elif name.startswith("/") or url_scheme(name) is not None:
        problem = "is not relative to dirpath"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "has an empty, '.' or '..' component"
    elif parts[0] == META_PREFIX.rstrip("/"):
        problem = f"lies in the reserved folder {META_PREFIX!r}"
    elif len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
        problem = f"is longer than {_MAX_NAME_BYTES} bytes"
    elif any(len(part.encode("utf-8", "surrogatepass")) > _MAX_COMPONENT_BYTES for part in parts):
        problem = f"has a component of more than {_MAX_COMPONENT_BYTES} bytes"
    else:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            problem = "is not valid Unicode"
    if problem:
        raise InvalidNameError(
            f"checkpoint name {name!r} {problem}",
            hint="use a path relative to dirpath, such as 'epoch=0-step=500.ckpt'",
        )
    return name


def name_in(dirpath: str, path: StrPath) -> str:
    """The name of the checkpoint at ``path``: a path below ``dirpath``, or already a name.

    Args:
        dirpath: As :func:`normalize_dirpath` gives it.
        path: A full path or URL below ``dirpath``, or a name relative to it.

    Raises:
        InvalidNameError: Outside ``dirpath``, or not a valid name.
    """
    text = _text(path).rstrip("/")
    root = dirpath.rstrip("/")
    if url_scheme(text) is None and not os.path.isabs(text):
        return validate_name(text)
    full = text if url_scheme(text) not in (None, "file", "local") else normalize_dirpath(text)
    # ".." must be refused, not resolved: a name says where it lies.
    if ".." in text.split("/") or not full.startswith(root + "/"):
        raise InvalidNameError(
            f"checkpoint path {text!r} is not below dirpath {dirpath!r}",
            hint="save below dirpath, or configure another dirpath",
        )
    return validate_name(full[len(root) + 1 :])


def step_in_name(name: str) -> int | None:
    """The step that a name tells: 500 for ``epoch=0-step=500.ckpt`` and ``step_500``; else None."""
    matches = list(_STEP_IN_NAME.finditer(name))
    return int(matches[-1]["step"]) if matches else None


def companion_of(name: str, suffix: str) -> str:
    """The name, path or URL of what is saved beside a checkpoint: ``x-EMA.ckpt`` for ``x.ckpt`` and ``-EMA``."""
    stem, dot, extension = name.rpartition(".")
    return f"{stem}{suffix}.{extension}" if dot and "/" not in extension else name + suffix


def is_companion(name: str, suffix: str) -> bool:
    """Whether :func:`companion_of` gives names like this one."""
    stem, dot, extension = name.rpartition(".")
    return (stem if dot and "/" not in extension else name).endswith(suffix)


def series_of(name: str) -> str:
    """What the names of one job's checkpoints have in common: all but the numbers of step and epoch.

    Process groups that save side by side (``tp0/step_5``, ``tp1/step_5``) are series of their own.
    """
    return _COUNTED.sub(r"\g<what>#", name)


class Located(NamedTuple):
    """Which checkpoint a caller means."""

    dirpath: str
    name: str
    step: int


def locate(dirpath: str, path: StrPath | None, step: int | None) -> Located:
    """The sharded checkpoint that a ``checkpoint_id`` and a step mean together.

    An explicit step wins over the one that a path tells, and appears in the name: ``step_5`` with
    step 7 is ``step_7``, and ``some/path`` with step 7 is ``some/path/step_7``. An absolute path
    outside a remote dirpath tells just its step.

    Args:
        dirpath: As :func:`normalize_dirpath` gives it.
        path: A name, or a path or URL below dirpath or elsewhere; None for ``step_<step>``.
        step: The training step; None for that in the path.

    Raises:
        InvalidNameError: No step is known, or it is below 0, or the name is not valid.
    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise InvalidNameError(f"Invalid step value: {step!r}", hint="a step is a whole number from 0 on")
    if path is None or not _text(path):
        if step is None:
            raise InvalidNameError("Invalid step value: none is given", hint=_STEP_HINT)
        return Located(dirpath, f"step_{step}", step)
    text = _text(path).rstrip("/")
    scheme = url_scheme(text)
    if scheme is None and not os.path.isabs(text):
        name = validate_name(text.removeprefix("./"))
    else:
        try:
            name = name_in(dirpath, text)
        except InvalidNameError:
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
    """Whether a callback called this checkpoint "last": ``last.ckpt``, ``last-v1.ckpt``, ``x-last.ckpt``."""
    return _LAST.search(name) is not None


def validate_namespace(namespace: str) -> str:
    """A namespace: letters, digits, ``_`` and ``-``.

    Raises:
        InvalidNameError: Empty, too long, or with other characters.
    """
    if not isinstance(namespace, str) or not _NAMESPACE.match(namespace) or len(namespace) > _MAX_NAMESPACE:
        raise InvalidNameError(
            f"invalid namespace {namespace!r}",
            hint=f"allowed: 1 to {_MAX_NAMESPACE} letters, digits, '_' and '-'",
        )
    return namespace


# ------------------------------------------------------------------------------------------- keys
def manifest_key(name: str) -> str:
    """``.tiered/manifests/<name>.json``: exists if and only if the checkpoint exists."""
    return f"{MANIFEST_PREFIX}{name}{_MANIFEST_SUFFIX}"


def name_from_manifest_key(key: str) -> str | None:
    """The inverse of :func:`manifest_key`; None for a key that is not a manifest's."""
    if not (key.startswith(MANIFEST_PREFIX) and key.endswith(_MANIFEST_SUFFIX)):
        return None
    return key[len(MANIFEST_PREFIX) : -len(_MANIFEST_SUFFIX)] or None


def lease_prefix(namespace: str) -> str:
    """``.tiered/leases/<namespace>/``: below it lies one object for each process that saves."""
    return f"{LEASE_PREFIX}{namespace}/"


def lease_key(namespace: str, token: str) -> str:
    """``.tiered/leases/<namespace>/<token>.json``."""
    return f"{lease_prefix(namespace)}{token}.json"


def rank_folder(rank: int) -> str:
    """``rank-00003``."""
    return f"rank-{rank:05d}"


class PartKey(NamedTuple):
    """What the key of a part's description on the durable tier tells."""

    name: str
    save_id: str
    rank: int


def part_key(name: str, save_id: str, rank: int) -> str:
    """``.tiered/parts/<name>/<save_id>/rank-00003.json``: put once all files of the part are there."""
    return f"{PART_PREFIX}{name}/{save_id}/{rank_folder(rank)}{_PART_SUFFIX}"


def parse_part_key(key: str) -> PartKey | None:
    """The inverse of :func:`part_key`; None for a key that is not a part's."""
    if not (key.startswith(PART_PREFIX) and key.endswith(_PART_SUFFIX)):
        return None
    name, _, rest = key[len(PART_PREFIX) : -len(_PART_SUFFIX)].rpartition("/")
    name, _, save = name.rpartition("/")
    rank = _RANK.match(rest)
    return PartKey(name, save, int(rank["rank"])) if name and rank and _SAVE_ID.match(save) else None


# -------------------------------------------------------------------------------------------- ids
_TIME_FORMAT = "%Y%m%dT%H%M%S.%f"
_COUNTER_DIGITS = 8
_SAVE_ID = re.compile(r"(?P<time>\d{8}T\d{6}\.\d{6})-(?P<random>[0-9a-f]{8})-(?P<counter>\d{8})\Z")
_RANK = re.compile(r"rank-(?P<rank>\d{5,9})\Z")
_RUN_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}\Z")


def new_run_id(after: str | None = None, now: float | None = None) -> str:
    """A run's id; ids sort, as text, in the order in which runs began.

    Args:
        after: A save id seen in any tier. The new id sorts behind it even where this machine's
            clock is behind that of the machine that gave it (a Lamport clock).
        now: Seconds since the epoch; the current time by default.
    """
    stamp = datetime.fromtimestamp(time.time() if now is None else now, timezone.utc)
    if after is not None:
        match = _SAVE_ID.match(after)
        if match:
            seen = datetime.strptime(match["time"], _TIME_FORMAT).replace(tzinfo=timezone.utc)
            if stamp <= seen:
                stamp = seen + timedelta(microseconds=1)
    return f"{stamp.strftime(_TIME_FORMAT)}-{secrets.token_hex(4)}"


def save_id(run_id: str, counter: int) -> str:
    """The id of the ``counter``-th operation of a run; ids sort, as text, in order of their making."""
    return f"{run_id}-{counter:08d}"


def before_its_run(save_id: str) -> str:
    """An id of its own that sorts before all of the run that this one is of, and behind earlier runs.

    Those of several saves of the run sort as the saves do.
    """
    match = _SAVE_ID.match(save_id)
    assert match is not None, save_id
    began = datetime.strptime(match["time"], _TIME_FORMAT).replace(tzinfo=timezone.utc)
    return f"{(began - timedelta(microseconds=1)).strftime(_TIME_FORMAT)}-{match['random']}-{match['counter']}"


def save_id_of_ranks(run_id: str, series: str, repeat: int, step: int) -> str:
    """The id of a save that ranks make without talking: all who know the same give the same id.

    Within a series, ids sort by the repeat and then by the step. Those of another series differ, and so
    do those of another run.

    Args:
        run_id: The run that the ranks agreed on.
        series: Which of the run's saves belong together, see :func:`series_of`.
        repeat: How often the series has gone back to a step that it had saved.
        step: The training step; -1 where it is not known.
    """
    stamp, _, random = run_id.partition("-")
    turn, counter = divmod(max(0, step), 10**_COUNTER_DIGITS)
    began = datetime.strptime(stamp, _TIME_FORMAT).replace(tzinfo=timezone.utc)
    moved = began + timedelta(milliseconds=repeat, microseconds=turn)
    mark = hashlib.sha256(f"{random}/{series}".encode()).hexdigest()[: len(random)]
    return save_id(f"{moved.strftime(_TIME_FORMAT)}-{mark}", counter)


def validate_save_id(text: str) -> str:
    """Gives ``text`` back where it is a save id, which makes it safe as a file's name.

    Raises:
        InvalidNameError: It is not.
    """
    if not isinstance(text, str) or not _SAVE_ID.match(text):
        raise InvalidNameError(f"not a save id: {text!r}")
    return text


def run_id_of(save_id: str) -> str:
    """The run whose operation this is."""
    return save_id.rpartition("-")[0]


def line_of(save_id: str) -> str:
    """What ids have in common that one process gave out, or ranks for one series; they tell these saves' order."""
    return run_id_of(save_id).rpartition("-")[2]


def part_op_id(save_id: str, rank: int, *, commits: bool) -> str:
    """The id of the operation that drains a part: the save's own for the part that commits it.

    Those of other ranks' parts (``<save_id>.rank-00003``) sort behind it, and before those of later saves.
    """
    return save_id if commits else f"{save_id}.{rank_folder(rank)}"


def save_id_of_op(op_id: str) -> str:
    """The save that an operation is about; the id of an alias, delete or cancel itself."""
    return op_id.partition(".rank-")[0]


def validate_op_id(text: str) -> str:
    """Gives ``text`` back where it is an operation's id, which makes it safe as a file's name.

    Raises:
        InvalidNameError: It is not.
    """
    head, dot, rank = text.partition(".rank-") if isinstance(text, str) else ("", "", "")
    if not _SAVE_ID.match(head) or (dot and not _RANK.match(f"rank-{rank}")):
        raise InvalidNameError(f"not an operation's id: {text!r}")
    return text
