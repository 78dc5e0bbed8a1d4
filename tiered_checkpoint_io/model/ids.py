"""The only module that formats or parses names, steps, keys, ids and URLs.

It depends only on the standard library, so that any module can use ``is_s3_url`` and the other functions. Ids of runs,
saves and operations sort as text in the order in which these were made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError, holds_secrets

_TIME_FORMAT = "%Y%m%dT%H%M%S.%f"
_COUNTER_DIGITS = 8
_SAVE_ID = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{8}-\d{8}\Z")
_RANK = re.compile(r"rank-(?P<rank>\d{5,9})\Z")


def rank_folder(rank: int) -> str:
    """Returns ``rank-00003``."""
    return f"rank-{rank:05d}"


def rank_of(folder: str) -> int | None:
    """Returns the inverse of :func:`rank_folder`; None for other text."""
    match = _RANK.match(folder)
    return int(match["rank"]) if match else None


def new_run_id(after: str | None = None, now: float | None = None, *, clock: Clock = SYSTEM) -> str:
    """Returns a run's id; ids sort, as text, in the order in which runs began.

    The new id sorts after ``after``, a save id seen in any tier, even if this machine's clock is behind the clock of
    the other machine (a Lamport clock).
    """
    stamp = datetime.fromtimestamp(clock.wall() if now is None else now, timezone.utc)
    if after is not None and is_save_id(after):
        stamp = max(stamp, _time_of(after) + timedelta(microseconds=1))
    return f"{stamp.strftime(_TIME_FORMAT)}-{clock.token(4)}"


def _time_of(some_id: str) -> datetime:
    return datetime.strptime(some_id.partition("-")[0], _TIME_FORMAT).replace(tzinfo=timezone.utc)


def save_id(run_id: str, counter: int) -> str:
    """Returns the id of the ``counter``-th operation of a run; ids sort, as text, in order of their making."""
    return f"{run_id}-{counter:08d}"


def save_id_of_ranks(run_id: str, series: str, repeat: int, step: int) -> str:
    """Returns the id of a save of ranks that do not communicate: equal arguments give equal ids.

    Within a series (see :func:`series_of`), ids sort by the repeat, which counts how often the series has gone back to
    a step that it had saved, and then by the step, -1 if it is not known. Ids of another series or another run differ.
    """
    random = run_id.partition("-")[2]
    turn, counter = divmod(max(0, step), 10**_COUNTER_DIGITS)
    moved = _time_of(run_id) + timedelta(milliseconds=repeat, microseconds=turn)
    mark = hashlib.sha256(f"{random}/{series}".encode()).hexdigest()[: len(random)]
    return save_id(f"{moved.strftime(_TIME_FORMAT)}-{mark}", counter)


def is_save_id(text: str) -> bool:
    """Returns True if the text is a save id."""
    return _SAVE_ID.match(text) is not None


def validate_save_id(text: str) -> str:
    """Returns a save id, which is safe as a file's name; raises ConfigError for other text."""
    if not isinstance(text, str) or not is_save_id(text):
        raise ConfigError(f"not a save id: {text!r}")
    return text


def run_id_of(save_id: str) -> str:
    """Returns the run whose operation this is."""
    return save_id.rpartition("-")[0]


def line_of(save_id: str) -> str:
    """Returns the common part of save ids whose order is known: one process's, or the ranks' for one series."""
    return run_id_of(save_id).rpartition("-")[2]


def part_op_id(save_id: str, rank: int, *, commits: bool) -> str:
    """Returns the id of the operation that drains a part: the save's own for the part that commits it.

    Ids of other ranks' parts (``<save_id>.rank-00003``) sort after it, and before ids of later saves.
    """
    return save_id if commits else f"{save_id}.{rank_folder(rank)}"


def save_id_of_op(op_id: str) -> str:
    """Returns the save that an operation is about; the id of an alias, delete or cancel itself."""
    return op_id.partition(".rank-")[0]


#: The scheme of sentinels.
SENTINELS = "tiered"
#: ``ckpt_path`` to resume from the newest intact checkpoint, or from scratch.
LATEST = "tiered:latest"
#: The same for the newest checkpoint that a callback called "last"; used by ``ckpt_path="last"``.
LAST = "tiered:last"
#: The same as a URL: Lightning asks the file system of the path that it resolves "last" to.
LAST_URL = "tiered://last"
#: Values that a load takes, for its errors.
LOADABLE = f"{LATEST}, {LAST}, a name, a path or a URL"

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)\Z", re.DOTALL)
#: ``Path("s3://bucket/key")`` has lost a slash when it becomes text again.
_MANGLED_S3 = re.compile(r"s3:/(?!/)")
#: An access point in a bucket's place; its own name is the last of it.
_ACCESS_POINT = r"arn:aws[a-z-]*:s3:[a-z0-9-]*:\d{12}:accesspoint[:/][A-Za-z0-9.-]+"
_BUCKET = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9._-]{{1,254}}|{_ACCESS_POINT})\Z")
_BUCKET_AND_KEY = re.compile(rf"(?P<bucket>{_ACCESS_POINT}(?=/|\Z)|[^/]*)/?(?P<key>.*)\Z", re.DOTALL)
#: Misspelt ``s3://``.
_MISSPELT_S3 = re.compile(r"s3(?:[an]:)?(?://+|:/?(?!/))(?P<rest>.*)\Z", re.DOTALL | re.IGNORECASE)
#: Misspelt scheme, which would be a folder of the working directory; no drive's letter.
_MISSPELT = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(?P<rest>[^/].*)\Z", re.DOTALL)
#: The schemes of folders on this machine.
_LOCAL = ("file", "local")
#: Variables that OmegaConf or a shell would have replaced.
_VARIABLE = re.compile(r"\$(?:\{|[A-Z_][A-Z0-9_]+)")
#: Characters that Python makes of bytes not valid in the locale's encoding; only folders may have such names.
SURROGATE = re.compile("[\ud800-\udfff]")

StrPath = str | os.PathLike[str]


# --------------------------------------------------------------------------------------- S3 URLs
def text_of(path: StrPath) -> str:
    """Returns a path or URL as text, with the slash back that ``Path`` took from ``s3://``."""
    text = os.fspath(path)
    return _MANGLED_S3.sub("s3://", text, count=1) if text.startswith("s3:") else text


def is_s3_url(path: StrPath) -> bool:
    """Returns True if a path is an ``s3://`` URL; a ``Path``'s lost slash is forgiven."""
    return text_of(path).startswith("s3://")


def build_s3_url(bucket: str, key: str = "") -> str:
    """Returns ``"s3://b/x/y"`` for ``("b", "x/y")``; without a key, ``"s3://b"``. Slashes at the key's start are
    dropped.

    The bucket may be the ARN of an access point, ``arn:aws:s3:eu-west-1:123456789012:accesspoint/name``. Raises
    ConfigError for a name that S3 does not allow.
    """
    if not _BUCKET.match(bucket):
        raise ConfigError(
            f"invalid S3 bucket name {bucket!r}",
            hint="a bucket's name has 2-255 letters, digits, '.', '_' or '-'; an access point is"
            " arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME",
        )
    key = key.lstrip("/")
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


def parse_s3_url(url: StrPath) -> tuple[str, str]:
    """Returns ``("b", "x/y")`` for ``"s3://b/x/y"``; without a key, ``("b", "")``; ConfigError for any other text."""
    text = text_of(url)
    if not text.startswith("s3://"):
        raise ConfigError(f"not an S3 URL: {text!r}", hint="it must look like s3://bucket/prefix")
    match = _BUCKET_AND_KEY.match(text[len("s3://") :])
    bucket, key = (match["bucket"], match["key"]) if match else ("", "")
    if not bucket:
        raise ConfigError(f"S3 URL without a bucket: {text!r}", hint="it must look like s3://bucket/prefix")
    build_s3_url(bucket)
    return bucket, key


# ---------------------------------------------------------------------------------------- dirpath
def url_scheme(path: StrPath) -> str | None:
    """Returns the scheme of a URL (``"s3"``, ``"gs"``, ``"memory"`` ...); None for a local path."""
    text = text_of(path)
    # Asked several times at each save, mostly of names.
    match = _URL.match(text) if "://" in text else None
    return match["scheme"].lower() if match else None


def normalize_dirpath(dirpath: StrPath) -> str:
    """Returns one spelling for a durable tier's root: URL or local path without links, no trailing slash.

    Raises ConfigError for a URL without a bucket, or with a secret, which descriptions of parts would have to hold.
    """
    if not isinstance(dirpath, str | os.PathLike):
        hint = "give an S3 URL, another fsspec URL, or a directory; from_config(...) takes a whole block"
        raise ConfigError(f"a {type(dirpath).__name__} is no path or URL", hint=hint)
    text = text_of(dirpath)
    if holds_secrets(text):
        raise ConfigError(
            "the URL holds a password, key or token",
            hint="give credentials to boto3's ordinary chain, or to fsspec's configuration (FSSPEC_<SCHEME>_<NAME>)",
        )
    if not text.strip():
        raise ConfigError("dirpath is empty", hint="give an S3 URL, another fsspec URL, or a directory")
    scheme = url_scheme(text)
    if scheme == "s3":
        bucket, key = parse_s3_url(text)
        return build_s3_url(bucket, key.strip("/"))
    if scheme in _LOCAL:
        text = text.split("://", 1)[1] or "/"
    elif scheme is not None:
        return text if text.endswith("://") else text.rstrip("/")
    return os.path.abspath(text) if "\0" in text else os.path.realpath(at_home(text))


def refuse_misspelt(dirpath: str) -> None:
    """Raises ConfigError for a path that was meant otherwise, with the right spelling.

    For example, ``s3//bucket`` or ``file://data`` would be a folder of the working directory.
    """
    text = text_of(dirpath)
    if url_scheme(text) not in (None, *_LOCAL) and SURROGATE.search(text):
        # For example, from a terminal whose locale is not UTF-8.
        raise ConfigError("it is not valid Unicode", hint="write it as UTF-8, where the locale is UTF-8 as well")
    if text != text.strip():
        raise ConfigError("it begins or ends with white space", hint=f"write {text.strip()}")
    if _VARIABLE.search(text):
        hint = "resolve it, as by ${oc.env:NAME} in YAML; or write its value"
        raise ConfigError("it holds a variable that was not replaced", hint=hint)
    if text in ("None", "null") or (url_scheme(text) is None and "://" in text):
        # From str(None), or quotes in an env file: otherwise it would be a folder of the working directory.
        raise ConfigError("it is no folder or URL", hint="write it as s3://bucket/prefix, without quotes")
    misspelt = _MISSPELT_S3.match(text)
    if misspelt:
        raise ConfigError("it is not an S3 URL", hint=f"write s3://{misspelt['rest'].lstrip('/')}")
    misspelt = _MISSPELT.match(text)
    if misspelt:
        url = text.replace(":/", ":///" if misspelt["scheme"].lower() in _LOCAL else "://", 1)
        raise ConfigError("a URL has two slashes", hint=f"write {url}, as text: a Path loses a slash")
    scheme, _, path = text.partition("://")
    if url_scheme(text) in _LOCAL and not at_home(path).startswith("/"):
        hint = f"write three slashes, as in {scheme}:///{path or 'folder'}"
        raise ConfigError(f"{scheme}:// without an absolute path", hint=hint)
    if url_scheme(dirpath) in ("http", "https"):
        hint = "for a bucket, write s3://bucket/prefix; the address of a server other than AWS is its endpoint_url"
        raise ConfigError("no checkpoint can be written to a web address", hint=hint)


def at_home(path: str) -> str:
    """Replaces ``~`` at the start of a path by the home folder, as a shell does; raises ConfigError without one.

    YAML does not, and Lightning's own callback does the same.
    """
    if path != "~" and not path.startswith("~/"):
        return path
    full = os.path.expanduser(path)
    if full == path:
        raise ConfigError(
            "this user has no home folder for ~: HOME is not set", hint="set HOME, or write the whole path"
        )
    return full


def join_url(dirpath: str, name: str) -> str:
    """Returns the full path of a checkpoint, as Lightning shows it in ``best_model_path``."""
    return f"{dirpath.rstrip('/')}/{name}" if not dirpath.endswith("://") else dirpath + name


#: The prefix of all our objects on the durable tier, besides the checkpoints themselves.
META_PREFIX = ".tiered/"
MANIFEST_PREFIX = META_PREFIX + "manifests/"
SAVES_PREFIX = META_PREFIX + "saves/"
#: The run that writes to the dirpath: see :mod:`lease`.
LEASE_KEY = META_PREFIX + "lease.json"
HOLDS_PREFIX = META_PREFIX + "holds/"
#: Small objects that are written, read and deleted to see whether that is possible.
PREFLIGHT_PREFIX = META_PREFIX + "preflight/"

#: End of a manifest's key, after the checkpoint's name.
MANIFEST_SUFFIX = ".json"
_PART_SUFFIX = ".json"
_INDEX = "index.json"
#: Number of a rank's digits that end its key in a listing of one prefix: a page of S3 has 1,000 keys.
_PAGE_DIGITS = 3


def manifest_key(name: str) -> str:
    """Returns ``.tiered/manifests/<name>.json``: exists if and only if the checkpoint exists."""
    return f"{MANIFEST_PREFIX}{name}{MANIFEST_SUFFIX}"


def name_from_manifest_key(key: str) -> str | None:
    """Returns the inverse of :func:`manifest_key`; None for a key that is not a manifest's."""
    if not (key.startswith(MANIFEST_PREFIX) and key.endswith(MANIFEST_SUFFIX)):
        return None
    return key[len(MANIFEST_PREFIX) : -len(MANIFEST_SUFFIX)] or None


def save_prefix(save_id: str) -> str:
    """Returns ``.tiered/saves/<save_id>/``: the prefix of a save's index and descriptions."""
    return f"{SAVES_PREFIX}{save_id}/"


def index_key(save_id: str) -> str:
    """Returns ``.tiered/saves/<save_id>/index.json``: the files of all parts; written after all descriptions."""
    return save_prefix(save_id) + _INDEX


def description_key(save_id: str, rank: int) -> str:
    """Returns ``.tiered/saves/<save_id>/rank-00003.json``: put once all files of the part are there."""
    return f"{save_prefix(save_id)}{rank_folder(rank)}{_PART_SUFFIX}"


def rank_of_description(key: str) -> int | None:
    """Returns the rank of :func:`description_key`; None for another key."""
    return rank_of(key.rpartition("/")[2].removesuffix(_PART_SUFFIX)) if key.endswith(_PART_SUFFIX) else None


def description_prefixes(save_id: str, ranks: Iterable[int]) -> list[str]:
    """Prefixes below which the descriptions of these ranks lie, at most 1,000 below each."""
    return sorted({save_prefix(save_id) + rank_folder(rank)[:-_PAGE_DIGITS] for rank in ranks})


def hold_prefix(name: str) -> str:
    """Returns ``.tiered/holds/<name>/``: below it lies one object for each hold of a checkpoint."""
    return f"{HOLDS_PREFIX}{name}/"


#: The small file in which Lightning's strategies save loops, callbacks and hyperparameters, next to the shards.
REST = "meta.pt"
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
    """Returns a checkpoint's name, a relative path that does not leave its folder; raises ConfigError for others."""
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

    Raises ConfigError for another path, or a name that is not valid.
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
    named = step_in_name(name)
    return series_of(name, -1 if named is None else named)


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
    used. Without a path, the name is ``step_<step>``. Raises ConfigError without a step, or for another name.
    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP):
        raise ConfigError(f"Invalid step value: {step!r}", hint="a step is a whole number from 0 on, below 2^62")
    if path is None or not text_of(path):
        if step is None:
            raise ConfigError("Invalid step value: none is given", hint=_STEP_HINT)
        return Located(dirpath, f"step_{step}", step)
    text = text_of(path).rstrip("/")
    scheme = url_scheme(text)
    try:
        name = name_in(dirpath, text)
    except ConfigError:
        named = step_in_name(text)
        if scheme is None and not os.path.isabs(text):
            raise
        if scheme is None and url_scheme(dirpath) is not None:
            if step is None and named is None:
                raise
            name = f"step_{named if step is None else step}"
        else:
            parent, _, last = text.rpartition("/")
            if ".." in text.split("/") or not parent or parent.endswith(":/"):
                raise
            dirpath, name = normalize_dirpath(parent), validate_name(last)
    named = step_in_name(name)
    if step is None:
        return Located(dirpath, name, -1 if named is None else named)
    if named is None:
        name = validate_name(f"{name}/step_{step}")
    elif named != step:
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
