"""Shows what docstrings name by a role, as ``:class:`Name```, as code alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")


class Roles(Extension):
    """Extension for the docstrings of every object of the package."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
