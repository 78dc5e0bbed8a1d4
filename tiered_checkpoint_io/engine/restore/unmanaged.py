"""Checkpoints at dirpath that this package did not save: plain ones of Lightning, or of another tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA

if TYPE_CHECKING:
    from tiered_checkpoint_io.engine.restore.choice import Found

#: End of the names of Lightning's checkpoints.
_ENDING = ".ckpt"


class Entries:
    """Objects and folders on the durable tier; each folder is listed once, when it is first asked for."""

    def __init__(self, children: Callable[[str], Iterable[str]]) -> None:
        """Takes ``children``: see :func:`stores.base.children_of`."""
        self._children = children
        self._listed: dict[str, frozenset[str]] = {}

    def below(self, prefix: str = "") -> frozenset[str]:
        """Returns the names right below a prefix, folders' names with a slash.

        Raises:
            StoreError: The durable tier could not be read.
        """
        if prefix not in self._listed:
            self._listed[prefix] = frozenset(self._children(prefix))
        return self._listed[prefix]

    def has(self, name: str) -> bool:
        """Returns True if a checkpoint has this name, an object or a folder of DCP; raises as :meth:`below`."""
        prefix = ""
        *folders, last = name.split("/")
        for folder in folders:
            if f"{folder}/" not in self.below(prefix):
                return False
            prefix += f"{folder}/"
        names = self.below(prefix)
        return last in names or (f"{last}/" in names and METADATA in self.below(f"{prefix}{last}/"))


def plain_checkpoints(entries: Iterable[str]) -> list[str]:
    """Returns the names of Lightning checkpoints: "last" first, then the greatest steps."""

    def order(name: str) -> tuple[bool, int, str]:
        step = ids.step_in_name(name)
        return not ids.is_last(name), -1 if step is None else -step, name

    return sorted((name for name in entries if name.endswith(_ENDING)), key=order)


def warn_of_later(log: Logger, dirpath: str, latest: Found, entries: Iterable[str]) -> None:
    """Warns if a Lightning checkpoint's name has a later step than the one that was loaded as the latest."""
    steps = {name: ids.step_in_name(name) for name in plain_checkpoints(entries)}
    later = next((name for name, step in steps.items() if step is not None and step > latest.step), None)
    if later is not None:
        log.warning(
            "%s took %s (step %d), and passes by %s (step %d), which has no manifest, as where Lightning alone saved"
            " it; to resume from that, give its name: ckpt_path=%r",
            ids.LATEST,
            latest.name,
            latest.step,
            later,
            steps[later],
            ids.join_url(dirpath, later),
        )
