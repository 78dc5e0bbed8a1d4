"""Structured log lines: ``[time] [namespace] [logger] [LEVEL] [file:line] [Rank r] Step s: text``."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from tiered_checkpoint_io.errors import ConfigError

GIB = 1 << 30
_FORMAT = (
    "[%(asctime)s] [%(namespace)s] [%(name)s] [%(levelname)s] [%(filename)s:%(lineno)d] [Rank %(rank)s] %(message)s"
)
_NAME = "tiered_checkpoint_io"
#: Number of names that a message lists.
_NAMED = 3

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[Any]
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    # At run time, Python 3.10 takes no type there.
    _Adapter, _StreamHandler = logging.LoggerAdapter, logging.StreamHandler
Logger = logging.Logger | _Adapter


class CheckpointLogger(_Adapter):
    """Adds namespace, rank and step to each record; ``file:line`` stays the caller's.

    Rank 0 speaks: a line of level INFO on rank 0 has level DEBUG on all others.
    """

    def __init__(self, logger: logging.Logger, extra: MutableMapping[str, Any]) -> None:
        super().__init__(logger, extra)
        if extra["rank"] != 0:
            # Bound, not wrapped: a frame of ours would be taken for the caller's.
            self.info = self.debug  # type: ignore[method-assign]

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        if self.logger.name == _NAME:
            # By default, dictConfig disables each existing logger. Users who want silence set a level.
            self.logger.disabled = False
        return super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        context = dict(self.extra or {})
        kwargs["extra"] = {**context, **(kwargs.get("extra") or {})}
        step = context.get("step")
        return (f"Step {step}: {msg}" if step is not None else msg), kwargs

    def at_step(self, step: int) -> CheckpointLogger:
        """Returns the same logger for messages about one training step; a step below 0 is unknown."""
        return CheckpointLogger(self.logger, {**(self.extra or {}), "step": step if step >= 0 else None})


#: Drops its records: for what is logged elsewhere in other words.
QUIET = logging.Logger(f"{_NAME}.quiet", logging.CRITICAL + 1)


def get_logger(
    namespace: str, *, rank: int = 0, log_dir: str | None = None, logger: Logger | None = None
) -> CheckpointLogger:
    """Returns a logger for one job and global rank; ``logger`` is the user's own, used instead of ours.

    ``log_dir`` gets a further log, ``{namespace}_checkpointing.log``; raises ConfigError if that can't be opened.
    """
    target: Any = logger if logger is not None else _own_logger()
    while isinstance(target, logging.LoggerAdapter):
        target = target.logger
    made = CheckpointLogger(target, {"namespace": namespace, "rank": rank, "step": None})
    if log_dir is not None:
        # YAML has no home folder: "~/logs" would be a folder "~" of the working directory.
        _add_file(made, namespace, os.path.abspath(os.path.expanduser(log_dir)))
    return made


def names_text(names: Sequence[str]) -> str:
    """Returns ``a, b, c and 2 more``."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def size_text(size: int) -> str:
    """Returns ``1.50 GiB``, ``12.00 MiB`` or ``0.35 KiB``."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / (1 << 20):.2f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.2f} KiB"


def of_step(step: int) -> str:
    """Returns ``Step 5: ``; empty for a step below 0, which is unknown."""
    return f"Step {step}: " if step >= 0 else ""


def rate(size: int, seconds: float) -> str:
    """Returns ``1.50 GiB in 0.75 s (2.00 GiB/s)``."""
    return f"{size_text(size)} in {seconds:.3f} s ({size_text(int(size / max(seconds, 1e-9)))}/s)"


class _Console(_StreamHandler):
    """Writes records that no other handler shows to stderr, as it is at that moment: no line appears twice."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_formatter())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        # Levels of another handler are the user's business; a file is not a console.
        others = (each for each in _handlers_of(record) if each is not self)
        if all(isinstance(each, logging.FileHandler | logging.NullHandler) for each in others):
            super().emit(record)


class _JobFile(logging.handlers.WatchedFileHandler):
    """``{namespace}_checkpointing.log``, made again if it was moved away; other jobs here have files of their own.

    If the file can't be written, as on a full disk, training continues and lines are lost; one line on stderr says so.

    Attributes:
        users: The loggers that it was opened for, as long as anything holds them.
    """

    def __init__(self, path: str, namespace: str) -> None:
        super().__init__(path)
        self._has_lost = False
        self.setFormatter(_formatter())
        self.addFilter(lambda record: getattr(record, "namespace", namespace) == namespace)
        self.users: weakref.WeakSet[CheckpointLogger] = weakref.WeakSet()

    def _open(self) -> TextIOWrapper:
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            # The file can't be made again just now, for example because no descriptor is left.
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        if not self._has_lost and sys.stderr is not None:
            self._has_lost = True
            text = f"{_NAME}: can't write the log {self.baseFilename}, and leaves lines out: {sys.exc_info()[1]}"
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr)


def _own_logger() -> logging.Logger:
    """Returns our own logger. The user's level, handlers and ``propagate`` are kept, set before this or later."""
    logger = logging.getLogger(_NAME)
    if not any(isinstance(each, _Console) for each in logger.handlers):
        logger.addHandler(_Console())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


def _handlers_of(record: logging.LogRecord) -> Iterator[logging.Handler]:
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _add_file(made: CheckpointLogger, namespace: str, log_dir: str) -> None:
    logger: Any = made.logger
    path = os.path.join(log_dir, f"{namespace}_checkpointing.log")
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            if isinstance(handler, _JobFile):
                handler.users.add(made)
            return
    # A process that trains one job after the other keeps no descriptors of ended jobs.
    for handler in [each for each in logger.handlers if isinstance(each, _JobFile) and not each.users]:
        logger.removeHandler(handler)
        handler.close()
    try:
        handler = _JobFile(path, namespace)
    except OSError as error:
        hint = "name a folder that this user can write to, or null for no file"
        raise ConfigError(f"log_dir is {log_dir!r}: no log can be written there: {error}", hint=hint) from error
    handler.users.add(made)
    logger.addHandler(handler)


def _formatter() -> logging.Formatter:
    # Records of libraries that share the handler carry neither rank nor namespace.
    return logging.Formatter(_FORMAT, defaults={"namespace": "-", "rank": "-"})
