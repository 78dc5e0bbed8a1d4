"""The environment of a drain's process: the trainer's, for a process in another folder."""

from __future__ import annotations

import os

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


def _from(folder: str, path: str) -> str:
    # What boto3 expands is left to it.
    if os.path.isabs(os.path.expandvars(os.path.expanduser(path))):
        return path
    return os.path.join(folder, path) if path else folder
