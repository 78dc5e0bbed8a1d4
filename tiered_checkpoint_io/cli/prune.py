"""The command that removes checkpoints that no policy keeps from the durable tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer

from tiered_checkpoint_io.cli.answers import ask, claimed
from tiered_checkpoint_io.cli.options import Address, Dirpath, Output, wrong_use
from tiered_checkpoint_io.cli.output import INTERRUPTED, Columns, as_json, say, show, write_json
from tiered_checkpoint_io.engine.drain.process import ended_by_signal
from tiered_checkpoint_io.engine.durable.retention import refused_text, remove_all
from tiered_checkpoint_io.engine.durable.sweep import RemovalAttempt, Survey, sweep
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.retention import Best, Checkpoint, Policy, kept, policies_from
from tiered_checkpoint_io.stores import Store


class _Plan(NamedTuple):
    """The checkpoints that there are, and why each stays."""

    found: Sequence[Checkpoint]
    unread: Mapping[str, Exception]
    reasons: Mapping[str, tuple[str, ...]]

    @property
    def going(self) -> list[Checkpoint]:
        return [each for each in self.found if not self.reasons[each.name]]


@dataclass(frozen=True, kw_only=True)
class Prune(Output, Address):
    """Deletes checkpoints from the durable tier that no policy keeps.

    Without --yes it only shows what would go, and why each of the others stays.

    Always kept: the newest that training can resume from, aliases and what they stand for, and copies such as
    last.ckpt. Refused with --yes while a run writes to the dirpath.
    """

    dirpath: Dirpath
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would go.")] = False
    keep_latest: Annotated[int | None, typer.Option(metavar="N", help="Keep the N latest steps.")] = None
    keep_every_steps: Annotated[int | None, typer.Option(metavar="N", help="Keep one in N steps.")] = None
    keep_best: Annotated[int | None, typer.Option(metavar="N", help="Keep the N best by --metric.")] = None
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The metric for --keep-best, such as val_loss.")
    ] = None
    mode: Annotated[str | None, typer.Option(metavar="MODE", help="The better values: min (the default) or max.")] = (
        None
    )

    def run(self) -> None:
        """Shows the checkpoints that would go, or deletes them; the status is 1 if the server refuses a delete."""
        policies, config = self._policies(), self.config(self.dirpath)
        plan = ask(config, lambda store: _plan(store, policies))
        attempts, swept = list[RemovalAttempt](), list[str]()
        if self.yes:
            ending = ended_by_signal(logging.getLogger("tiered_checkpoint_io"), late=INTERRUPTED)
            with ending as stop, claimed(config, stop, makes_room=True) as is_ours:
                if is_ours:
                    # The tier may have changed since the first look.
                    plan = ask(config, lambda store: _plan(store, policies))
                    # Printed after the last delete: a closed pipe must not stop it half-way.
                    attempts, swept = ask(
                        config, lambda store: (remove_all(store, plan.going, stop), _swept(store, config))
                    )
            if stop.is_set():
                gone = sum(each.is_gone for each in attempts)
                say(f"interrupted: removed {gone} of {len(plan.going)}; the others are unchanged", err=True)
                raise typer.Exit(INTERRUPTED)
        self._show(config.dirpath, plan, attempts, swept)
        raise typer.Exit(any(each.refusal is not None for each in attempts))

    def _policies(self) -> tuple[Policy, ...]:
        """Returns the policies of the options; never none."""
        if self.keep_best is not None and self.metric is None:
            raise typer.BadParameter("--keep-best needs --metric, such as --metric val_loss")
        given = {
            "latest": self.keep_latest,
            "every_steps": self.keep_every_steps,
            "best": self.keep_best,
            "metric": self.metric,
            "mode": self.mode,
        }
        with wrong_use():
            policies = policies_from({key: value for key, value in given.items() if value is not None})
        if not policies:
            raise typer.BadParameter("no policy is given; say what to keep, such as --keep-latest 3")
        return policies

    def _show(self, dirpath: str, plan: _Plan, attempts: Sequence[RemovalAttempt], swept: Sequence[str]) -> None:
        newest_first = sorted(plan.found, key=lambda each: each.save_id, reverse=True)
        gone = [each.checkpoint for each in attempts if each.is_gone] if self.yes else plan.going
        gone.sort(key=lambda each: each.save_id)
        size, refused = sum(each.size for each in gone), [each for each in attempts if each.refusal is not None]
        if self.as_json:
            document = {
                "dirpath": dirpath,
                "dry_run": not self.yes,
                "checkpoints": [{**as_json(each), "reasons": plan.reasons[each.name]} for each in newest_first],
                "unreadable": sorted(plan.unread),
                "removed": [each.name for each in gone] if self.yes else [],
                "removed_size_bytes": size if self.yes else 0,
                "refused": [
                    {"name": each.checkpoint.name, "removed": each.is_gone, "error": str(each.refusal)}
                    for each in refused
                ],
                "swept": swept,
            }
            write_json("prune", document)
            return
        stays, names = [each for each in refused if not each.is_gone], {each.name for each in gone}
        units = {each.checkpoint.unit for each in stays}

        def kept_by(each: Checkpoint) -> str:
            if each.name in plan.unread:
                return "it can't be read"
            if each.name in names or plan.reasons[each.name]:
                return ", ".join(plan.reasons[each.name])
            by_server = "the server, which refuses to delete it"
            return by_server if each.unit in units else "in use, or saved again, meanwhile"

        word = "removed" if self.yes else "goes"
        columns: Columns = {
            "name": "name",
            "decision": lambda each: word if each.name in names else "stays",
            "step": lambda each: "?" if each.name in plan.unread else ids.known(each.step),
            "size": lambda each: "?" if each.name in plan.unread else "" if each.alias_of else size_text(each.size),
            "kept by": kept_by,
        }
        unread = [Checkpoint(name, "") for name in sorted(plan.unread)]
        show([*unread, *newest_first], columns, title=dirpath)
        if self.yes:
            say(f"removed {len(gone)}, {size_text(size)}")
        else:
            say(f"{len(gone)} would go, {size_text(size)}" + ("; delete with --yes" if gone else ""))
        if swept:
            say(f"incomplete saves removed: {len(swept)}")
        if stays:
            say(f"error: {refused_text(stays)}", err=True)
        if left := [each.refusal for each in refused if each.is_gone]:
            what = f"files of {len(left)} removed checkpoint{'s' if len(left) > 1 else ''} are left"
            say(f"error: {what}; a later sweep tries again: {left[0]}", err=True)


def _plan(store: Store, policies: Sequence[Policy]) -> _Plan:
    survey = Survey()
    found = survey.look(store)
    if not found and not survey.unread:
        raise CheckpointNotFoundError(
            "there is no checkpoint at this dirpath",
            operation="prune",
            tier="durable",
            key=store.url,
            hint="check dirpath",
        )
    _refuse_unknown_metrics(found, policies)
    return _Plan(found, survey.unread, kept(found, policies))


def _swept(store: Store, config: TieredCheckpointConfig) -> list[str]:
    # The lease of this command was written just now, so its time is that of the store.
    now = max((entry.modified for entry in store.list(ids.META_PREFIX)), default=0.0)
    return [save_id for save_id, _ in sweep(store, Survey(), before=now - config.support.sweep_age_s)]


def _refuse_unknown_metrics(found: Sequence[Checkpoint], policies: Sequence[Policy]) -> None:
    """Refuses a metric that no checkpoint has: mistyped, mostly, and the best would go."""
    there = sorted({metric for each in found for metric in each.metrics})
    for policy in policies:
        if isinstance(policy, Best) and policy.metric not in there:
            raise ConfigError(
                f"no checkpoint has the metric {policy.metric}, so which are the best is not known",
                operation="prune",
                hint=f"the metrics there are: {', '.join(there) or 'none'}",
            )
