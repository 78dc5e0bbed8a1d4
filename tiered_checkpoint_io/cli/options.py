"""The options that several commands share, and what they make together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tiered_checkpoint_io.clock import DURABLE_TIMEOUT_S
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.inventory.node import all_roots, existing
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.version import __version__


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiered-ckpt {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]
Dirpath = Annotated[
    str, typer.Argument(metavar="DIRPATH", help="The durable tier: an S3 URL, any fsspec URL, or a directory.")
]
AnyDirpath = Annotated[
    str | None, typer.Argument(metavar="DIRPATH", help="The durable tier; without one, only this node's memory.")
]
Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One checkpoint: its name, path or URL, or tiered:latest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for programs.")]


def path_of(text: str | Path) -> Path:
    """The path that an option gives, ``~`` as well, which a shell leaves in ``--to=~/x``.

    An empty one, as of a variable that is not set, would be the working directory.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty")
    return Path(ids.at_home(str(text)))


def _folder(text: str) -> str:
    return str(path_of(text))


MemoryDir = Annotated[str, typer.Option(parser=_folder, metavar="PATH", help="The folder that holds the memory tier.")]
#: Where the memory tier lies by default.
SHM = str({each.name: each.default for each in fields(TieredCheckpointConfig)}["memory_dir"])


def has_memory(memory_dir: str) -> bool:
    """Whether to look at node memory: by default not on a machine that has none; one that is named has to be there."""
    return memory_dir != SHM or os.path.isdir(SHM)


@contextlib.contextmanager
def wrong_use() -> Iterator[None]:
    """A block in which a value that is not allowed is the user's, and ends the command with status 2."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True)
class Address:
    """How a durable tier is reached: options of a command, see :func:`spread`."""

    endpoint_url: Annotated[str | None, typer.Option(metavar="URL", help="Of an S3 server other than AWS.")] = None
    region: Annotated[str | None, typer.Option(metavar="NAME", help="The AWS region.")] = None
    profile: Annotated[str | None, typer.Option(metavar="NAME", help="Of the AWS configuration files.")] = None

    @property
    def keys(self) -> dict[str, Any]:
        """The same, as keys of the configuration."""
        return {key: value for key, value in asdict(self).items() if key != "timeout"}

    def config(self, dirpath: str) -> TieredCheckpointConfig:
        """The configuration of a durable tier; a value that is not allowed ends the command with status 2."""
        with wrong_use():
            return self.patient(TieredCheckpointConfig.from_any(dirpath=dirpath, **self.keys))

    def patient(self, config: TieredCheckpointConfig) -> TieredCheckpointConfig:
        """Returns a configuration with the wait for a silent server that the command names."""
        return config


@dataclass(frozen=True)
class Server(Address):
    """The same, and how long it is waited for."""

    timeout: Annotated[
        int,
        typer.Option(min=1, max=24 * 3600, metavar="SECONDS", help="Time to wait for a server that does not answer."),
    ] = DURABLE_TIMEOUT_S

    def patient(self, config: TieredCheckpointConfig) -> TieredCheckpointConfig:
        return config if self.timeout == DURABLE_TIMEOUT_S else config.with_support(durable_timeout_s=self.timeout)


@dataclass(frozen=True)
class Node:
    """Which memory tier of this node: options of a command, see :func:`spread`."""

    memory_dir: MemoryDir = SHM
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The job's namespace; needed only if this node's memory has several."),
    ] = None

    @property
    def is_named(self) -> bool:
        """Whether one is meant."""
        return self.namespace is not None

    @property
    def path(self) -> Path:
        """The root of the memory tier; without a name, of the only one there is.

        Raises:
            ConfigError: None is named, and there are several; or there is no such memory_dir.
        """
        if self.namespace is not None:
            with wrong_use():
                return namespace_root(self.memory_dir, self.namespace)
        roots = all_roots(self.memory_dir)
        if len(roots) > 1:
            names = ", ".join(each.name for each in roots)
            raise ConfigError(f"there are {len(roots)} namespaces: {names}", hint="name one by --namespace")
        return roots[0] if roots else namespace_root(self.memory_dir, "default")


@dataclass(frozen=True)
class Nodes(Node):
    """One memory tier of this node, or all of this user's."""

    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="One job's namespace; all of this user by default.")
    ] = None

    def paths(self) -> list[Path]:
        """Their roots; raises ConfigError where what is named is not there."""
        return [existing(self.path)] if self.is_named else all_roots(self.memory_dir)


#: As where no option is given.
ADDRESS, SERVER, NODE, NODES = Address(), Server(), Node(), Nodes()


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of its parameters that are a :class:`Server` and the like."""
    declared = signature(command, eval_str=True).parameters.values()
    kinds: dict[str, Any] = {each.name: each.annotation for each in declared if is_dataclass(each.annotation)}
    parameters: list[Parameter] = []
    for each in declared:
        kind = kinds.get(each.name)
        if kind is None:
            parameters.append(each)
            continue
        options = get_type_hints(kind, include_extras=True)
        for option in fields(kind):
            annotation = options[option.name]
            parameters.append(Parameter(option.name, each.kind, default=option.default, annotation=annotation))

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{option.name: given.pop(option.name) for option in fields(kind)})
            for name, kind in kinds.items()
        }
        command(**given, **made)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def name_of(config: TieredCheckpointConfig, name: str) -> str:
    """A checkpoint's name, given as such, or as a path or URL below dirpath; ``tiered:latest`` stays."""
    with wrong_use():
        if name != ids.LATEST and name.startswith(f"{ids.SENTINELS}:"):
            raise ConfigError(f"{name!r} is no name here", hint=f"allowed: a name, or {ids.LATEST}")
        return name if name == ids.LATEST else ids.name_in(config.dirpath, name)
