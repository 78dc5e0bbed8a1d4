"""Redaction: finds passwords, keys and tokens in a text, and hides them (pure)."""

from __future__ import annotations

import re

HIDDEN = "***"
#: ``scheme://user:password@``; a password may hold slashes, as AWS's keys do. A number is a port.
_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^/@:\s]*):(?!\d+(?:/|\Z))\S*@")
_WORDS = r"(?:key|secret|token|passw|credential|creds|auth|signature|\bsig)"
#: A field of a query, as presigned URLs have them.
_FIELD = re.compile(rf"(?P<head>[?&;][^=&;#\s]*{_WORDS}[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE)
_NAME = re.compile(rf"{_WORDS}|options", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Returns the text, with passwords of URLs and secret fields of queries replaced by ``***``."""
    return _FIELD.sub(rf"\g<head>{HIDDEN}", _PASSWORD.sub(rf"\g<head>:{HIDDEN}@", text))


def holds_secrets(text: str) -> bool:
    """Returns True if :func:`without_secrets` hides something of the text."""
    return without_secrets(text) != text


def shown(value: object, *, name: str = "") -> str:
    """Returns the value for an error's text; hidden altogether if ``name`` says that it is a secret.

    So are containers: their content is not known.
    """
    if isinstance(value, int | float | None):
        return repr(value)
    if _NAME.search(name) or isinstance(value, dict):
        return HIDDEN
    return without_secrets(repr(value))
