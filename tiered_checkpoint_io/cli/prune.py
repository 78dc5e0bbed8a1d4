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
from tiered_checkpoint_io.engine.durable.retention import in_order, refused_text, remove_all
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
        return in_order(each for each in self.found if not self.reasons[each.name])


class _Done(NamedTuple):
    """Results for the checkpoints that were to go, and the ids of the unnamed saves that are gone."""

    attempts: Sequence[RemovalAttempt] = ()
    swept: Sequence[str] = ()

    @property
    def gone(self) -> list[Checkpoint]:
        return in_order(each.checkpoint for each in self.attempts if each.is_gone)

    @property
    def refused(self) -> list[RemovalAttempt]:
        return [each for each in self.attempts if each.refusal is not None]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The policies."""

    keep_latest: Annotated[int | None, typer.Option(metavar="N", help="Keep the N latest steps.")] = None
    keep_every_steps: Annotated[int | None, typer.Option(metavar="N", help="Keep one in N steps.")] = None
    keep_best: Annotated[int | None, typer.Option(metavar="N", help="Keep the N best by --metric.")] = None
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The metric for --keep-best, such as val_loss.")
    ] = None
    mode: Annotated[str | None, typer.Option(metavar="MODE", help="The better values: min (the default) or max.")] = (
        None
    )

    def policies(self) -> tuple[Policy, ...]:
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


@dataclass(frozen=True, kw_only=True)
class Prune(Output, Address, Keep):
    """Deletes checkpoints from the durable tier that no policy keeps.

    Without --yes it only shows what would go, and why each of the others stays.

    Always kept: the newest that training can resume from, aliases and what they stand for, and copies such as
    last.ckpt. Refused with --yes while a run writes to the dirpath.
    """

    dirpath: Dirpath
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would go.")] = False

    def run(self) -> None:
        """Shows the checkpoints that would go, or deletes them; the status is 1 if the server refuses a delete."""
        policies, json = self.policies(), self.as_json
        config = self.config(self.dirpath)
        plan = ask(config, lambda store: _plan(store, policies))
        if not self.yes:
            _show(config, plan, _Done(), json=json, dry_run=True)
            return
        done = _Done()
        ending = ended_by_signal(logging.getLogger("tiered_checkpoint_io"), late=INTERRUPTED)
        with ending as stop, claimed(config, stop, makes_room=True) as is_ours:
            if is_ours:
                # The tier may have changed since the first look.
                plan = ask(config, lambda asked: _plan(asked, policies))
                # Printed after the last delete: a closed pipe must not stop it half-way.
                done = ask(config, lambda asked: _Done(remove_all(asked, plan.going, stop), _swept(asked, config)))
        if stop.is_set():
            say(f"interrupted: removed {len(done.gone)} of {len(plan.going)}; the others are unchanged", err=True)
            raise typer.Exit(INTERRUPTED)
        _show(config, plan, done, json=json, dry_run=False)
        if done.refused:
            raise typer.Exit(1)


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


# ------------------------------------------------------------------------------------------ output
def _show(config: TieredCheckpointConfig, plan: _Plan, done: _Done, *, json: bool, dry_run: bool) -> None:
    going, gone = plan.going, done.gone
    if json:
        document = {
            "dirpath": config.dirpath,
            "dry_run": dry_run,
            "checkpoints": [
                {**as_json(each), "reasons": plan.reasons[each.name]} for each in reversed(in_order(plan.found))
            ],
            "unreadable": sorted(plan.unread),
            "removed": [each.name for each in gone],
            "removed_size_bytes": sum(each.size for each in gone),
            "refused": [
                {"name": each.checkpoint.name, "removed": each.is_gone, "error": str(each.refusal)}
                for each in done.refused
            ],
            "swept": done.swept,
        }
        write_json("prune", document)
        return
    word = "goes" if dry_run else "removed"
    told = {each.name for each in (going if dry_run else gone)}
    refused = {each.checkpoint.unit for each in done.refused if not each.is_gone}
    columns: Columns = {
        "name": "name",
        "decision": lambda each: word if each.name in told else "stays",
        "step": lambda each: "?" if each.name in plan.unread else ids.known(each.step),
        "size": lambda each: "?" if each.name in plan.unread else "" if each.alias_of else size_text(each.size),
        "kept by": lambda each: (
            "it can't be read"
            if each.name in plan.unread
            else ", ".join(plan.reasons[each.name]) or _late(each, told, refused)
        ),
    }
    unread = [Checkpoint(name, "") for name in sorted(plan.unread)]
    show([*unread, *reversed(in_order(plan.found))], columns, title=config.dirpath)
    size = size_text(sum(each.size for each in (going if dry_run else gone)))
    if dry_run:
        say(f"{len(going)} would go, {size}" + ("; delete with --yes" if going else ""))
    else:
        say(f"removed {len(gone)}, {size}")
    if done.swept:
        say(f"incomplete saves removed: {len(done.swept)}")
    for line in _refused_lines(done):
        say(line, err=True)


def _late(each: Checkpoint, told: set[str], refused: set[int | str]) -> str:
    if each.name in told:
        return ""
    return "the server, which refuses to delete it" if each.unit in refused else "in use, or saved again, meanwhile"


def _refused_lines(done: _Done) -> list[str]:
    stays = [each for each in done.refused if not each.is_gone]
    lines = [f"error: {refused_text(stays)}"] if stays else []
    if left := [each.refusal for each in done.refused if each.is_gone]:
        what = f"files of {len(left)} removed checkpoint{'s' if len(left) > 1 else ''} are left"
        lines.append(f"error: {what}; a later sweep tries again: {left[0]}")
    return lines
