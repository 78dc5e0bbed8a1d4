"""Makes the text of a package index from README.md; pyproject.toml has everything else.

An index can't follow relative links: they lead to the tag in the repository, or are plain text if there is no URL yet.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


def long_description() -> str:
    """Returns README.md with absolute links."""
    repository = re.search(r'^Repository = "(.+?)/?"', (HERE / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    version = re.search(
        r'^__version__ = "(.+)"', (HERE / "tiered_checkpoint_io/version.py").read_text("utf-8"), re.MULTILINE
    )
    assert version is not None
    target = rf"[\1]({repository[1]}/blob/v{version[1]}/\2)" if repository else r"\1"
    return _LINK.sub(target, (HERE / "README.md").read_text("utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
