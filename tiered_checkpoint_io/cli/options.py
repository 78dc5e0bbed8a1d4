"""The options that several commands share. A command is a dataclass of its options, with ``run``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.inventory.node import all_roots, existing
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def command(kind: type[Any]) -> Callable[..., None]:
    """Returns the function of a command: an option for each field, its own before shared ones, then ``run``."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in sorted(fields(kind), key=lambda each: each.name not in vars(kind)["__annotations__"])
    ]

    def run(**options: Any) -> None:
        kind(**options).run()

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = kind.__doc__
    return run


def path_of(text: str | Path) -> Path:
    """Returns an option's path, also with ``~``, which a shell leaves in ``--to=~/x``.

    An empty one, as of a variable that is not set, would be the working directory.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty")
    return Path(ids.at_home(str(text)))


def _folder(text: str) -> str:
    return str(path_of(text))


@contextlib.contextmanager
def wrong_use() -> Iterator[None]:
    """Ends the command with status 2 if the block finds that a value is not allowed."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


Dirpath = Annotated[
    str, typer.Argument(metavar="DIRPATH", help="The durable tier: an S3 URL, any fsspec URL, or a directory.")
]
AnyDirpath = Annotated[
    str | None, typer.Argument(metavar="DIRPATH", help="The durable tier; without one, only this node's memory.")
]
Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One checkpoint: its name, path or URL, or tiered:latest.")
]
#: The folder of the memory tier by default.
SHM = str({each.name: each.default for each in fields(TieredCheckpointConfig)}["memory_dir"])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The folder of the memory tier."""

    memory_dir: Annotated[
        str,
        typer.Option(parser=_folder, metavar="PATH", help="Folder that holds the memory tier."),
    ] = SHM

    @property
    def has_memory(self) -> bool:
        """Node memory is looked at: by default not on a machine that has none; one that is named has to be there."""
        return self.memory_dir != SHM or os.path.isdir(SHM)


@dataclass(frozen=True, kw_only=True)
class Node(Memory):
    """One memory tier of this node."""

    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The job's namespace; needed only if this node's memory has several."),
    ] = None

    @property
    def root(self) -> Path:
        """The root of the memory tier; without a name, of the only one there is; or raises ConfigError."""
        if self.namespace is not None:
            with wrong_use():
                return namespace_root(self.memory_dir, self.namespace)
        roots = all_roots(self.memory_dir)
        if len(roots) > 1:
            names = ", ".join(each.name for each in roots)
            raise ConfigError(f"there are {len(roots)} namespaces: {names}", hint="name one by --namespace")
        return roots[0] if roots else namespace_root(self.memory_dir, "default")


@dataclass(frozen=True, kw_only=True)
class Nodes(Node):
    """One memory tier of this node, or all of this user's."""

    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="One job's namespace; all of this user by default.")
    ] = None

    def roots(self) -> list[Path]:
        """Returns their roots; raises ConfigError if the named one is not there."""
        return [existing(self.root)] if self.namespace is not None else all_roots(self.memory_dir)


@dataclass(frozen=True, kw_only=True)
class Address:
    """The way to a durable tier."""

    endpoint_url: Annotated[str | None, typer.Option(metavar="URL", help="Of an S3 server other than AWS.")] = None
    region: Annotated[str | None, typer.Option(metavar="NAME", help="The AWS region.")] = None
    profile: Annotated[str | None, typer.Option(metavar="NAME", help="Of the AWS configuration files.")] = None

    @property
    def keys(self) -> dict[str, Any]:
        """The same, as keys of the configuration."""
        return {"endpoint_url": self.endpoint_url, "region": self.region, "profile": self.profile}

    def config(self, dirpath: str) -> TieredCheckpointConfig:
        """Returns the configuration of a durable tier; a value that is not allowed ends the command with status 2."""
        with wrong_use():
            return TieredCheckpointConfig.from_any(dirpath=dirpath, **self.keys)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The form of the answer."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for programs.")] = False


def name_of(config: TieredCheckpointConfig, name: str) -> str:
    """Returns a checkpoint's name, given as such, or as a path or URL below dirpath; ``tiered:latest`` stays."""
    with wrong_use():
        if name != ids.LATEST and name.startswith(f"{ids.SENTINELS}:"):
            raise ConfigError(f"{name!r} is no name here", hint=f"allowed: a name, or {ids.LATEST}")
        return name if name == ids.LATEST else ids.name_in(config.dirpath, name)
