"""URLs and paths: of S3, of a durable tier's root, and of sentinels."""

from __future__ import annotations

import os
import re
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.redaction import holds_secrets

#: The scheme of sentinels.
SENTINELS = "tiered"
#: ``ckpt_path`` to resume from the newest intact checkpoint, or from scratch.
LATEST = "tiered:latest"
#: The same for the newest checkpoint that a callback called "last"; used by ``ckpt_path="last"``.
LAST = "tiered:last"
#: The same as a URL: Lightning asks the file system of the path that it resolves "last" to.
LAST_URL = "tiered://last"
#: The checkpoint whose monitored value is the best: ``tiered://best?mode=min&monitor=val_loss``.
_BEST_URL = "tiered://best"
#: Values that a load takes, for its errors.
LOADABLE = f"{LATEST}, {LAST}, {_BEST_URL}?mode=min&monitor=val_loss, a name, a path or a URL"

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
#: The hosts at which AWS serves buckets; the bucket is in the host or begins the path.
_AWS_HOST = re.compile(
    r"(?:(?P<bucket>.+)\.)?s3[.-](?:dualstack\.)?(?:(?P<region>[a-z0-9-]+)\.)?amazonaws\.com(?:\.cn)?\Z"
)
#: Characters that Python makes of bytes not valid in the locale's encoding; only folders may have such names.
SURROGATE = re.compile("[\ud800-\udfff]")

StrPath = str | os.PathLike[str]


# --------------------------------------------------------------------------------------- S3 URLs
def text_of(path: StrPath) -> str:
    """Returns a path or URL as text, with the slash back that ``Path`` took from ``s3://``."""
    text = os.fspath(path)
    return _MANGLED_S3.sub("s3://", text, count=1) if text.startswith("s3:") else text


def is_s3_url(path: StrPath) -> bool:
    """Returns True if a path is an ``s3://`` URL.

    Args:
        path: Text, or a ``Path``, whose lost slash is forgiven.
    """
    return text_of(path).startswith("s3://")


def build_s3_url(bucket: str, key: str = "") -> str:
    """Returns ``"s3://b/x/y"`` for ``("b", "x/y")``; without a key, ``"s3://b"``.

    Args:
        bucket: Its name, or the ARN of an access point, ``arn:aws:s3:eu-west-1:123456789012:accesspoint/name``.
        key: Below it; slashes at its beginning are dropped.

    Raises:
        ConfigError: The bucket's name is empty or not one that S3 allows.
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
    """Returns ``("b", "x/y")`` for ``"s3://b/x/y"``; without a key, ``("b", "")``.

    Args:
        url: Text, or a ``Path``, whose lost slash is forgiven.

    Raises:
        ConfigError: Not an S3 URL, or one without a bucket.
    """
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

    Raises:
        ConfigError: No text, empty, an S3 URL without a bucket, or a URL with a password or key in it: the
            drain's queue and the descriptions of parts would have to hold that.
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
    """Refuses names of an S3 bucket other than ``s3://bucket/prefix``, and URLs of no absolute path.

    A web server takes no writes, and ``s3//bucket`` or ``file://data`` would be a folder of the working directory.

    Raises:
        ConfigError: ``dirpath`` is such a path; the hint has the right spelling.
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
        raise ConfigError("no checkpoint can be written to a web address", hint=_as_s3(dirpath))


def _as_s3(address: str) -> str:
    """Returns a hint on how to write the web address of a bucket."""
    parts = urlsplit(address)
    aws = _AWS_HOST.match(parts.hostname or "")
    path = parts.path.strip("/")
    if aws and aws["bucket"]:
        path = f"{aws['bucket']}/{path}".strip("/")
    if not path:
        return "for a bucket, write s3://bucket/prefix"
    if aws:
        return f"write s3://{path}" + (f", with region: {aws['region']}" if aws["region"] else "")
    return f"if it is a bucket, write s3://{path}, with endpoint_url: {parts.scheme}://{parts.netloc}"


def at_home(path: str) -> str:
    """Replaces ``~`` at the start of a path by the home folder, as a shell does.

    YAML does not, and Lightning's own callback does the same.

    Raises:
        ConfigError: This user has no home: the path would be a folder ``~`` of the working directory.
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


# -------------------------------------------------------------------------------------- sentinels
def best_url(monitor: str | None, mode: str) -> str:
    """Returns the URL that loads the checkpoint whose ``monitor`` is the best; ``mode`` is ``min`` or ``max``."""
    return f"{_BEST_URL}?{urlencode({'mode': mode, 'monitor': monitor or ''})}"


def parse_best_url(text: str) -> tuple[str, Literal["min", "max"]] | None:
    """Returns the monitor and the mode of a :func:`best_url`; None for any other text.

    Raises:
        ConfigError: The text begins like one, but is none.
    """
    head, _, query = text.partition("?")
    if head != _BEST_URL:
        return None
    facts = dict(parse_qsl(query, keep_blank_values=True))
    if set(facts) != {"mode", "monitor"} or facts["mode"] not in ("min", "max"):
        raise ConfigError(f"not a sentinel: {text!r}", hint="it must look like tiered://best?mode=min&monitor=loss")
    return facts["monitor"], "max" if facts["mode"] == "max" else "min"
