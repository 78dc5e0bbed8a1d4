"""The report of a run: its events as one HTML page that needs nothing else (pure, but for the template)."""

from __future__ import annotations

import html
import importlib.resources
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model.events import Event, Totals, totals_of
from tiered_checkpoint_io.model.manifest import Manifest

_TEMPLATE = "report.html"


def page(title: str, events: Sequence[Event], durable: Iterable[Manifest], *, dirpath: str, now: float) -> str:
    """The page.

    Args:
        title: The run's name.
        events: Its events, in their order.
        durable: What the durable tier holds; none where it was not asked.
        dirpath: The durable tier; "" where it is not known.
        now: Seconds since the epoch.
    """
    moment = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    data = {
        "title": title,
        "about": f"{dirpath or 'durable tier not known'}; report of {moment}",
        "cards": _cards(totals_of(events), now) if events else [],
        "events": _with_runs([_shown(each) for each in events if each.get("event") in _SHOWN]),
        "durable": [
            {"name": name, "step": content.step, "bytes": content.size, "created": content.created}
            for name, content in ((each.name, each.content) for each in durable)
        ],
    }
    text = json.dumps(data, allow_nan=False)
    # Names may hold anything: nothing in it may end the script, or be an entity.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    template = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    return template.replace("@TITLE@", html.escape(f"{title}: checkpoints")).replace("@DATA@", text)


def _cards(totals: Totals, now: float) -> list[tuple[str, str, bool]]:
    """Label, value, and whether it wants a look."""
    elapsed = max(1e-9, (now if totals.running else max(totals.step_at, totals.began)) - totals.began)
    lost = totals.stall_s + totals.restore_s + totals.repeated_s
    return [
        ("Last step", _step(totals.step), False),
        ("Last durable step", _step(totals.durable_step), totals.durable_step < 0),
        ("Steps behind it", str(totals.step - max(0, totals.durable_step)) if totals.step >= 0 else "none", False),
        ("Goodput", f"{100 * max(0.0, 1 - lost / elapsed):.1f} %", False),
        ("Lost to stalls", _duration(totals.stall_s), False),
        ("Lost to restores", _duration(totals.restore_s), False),
        ("Lost to repeated steps", f"{_duration(totals.repeated_s)} ({totals.repeated_steps})", False),
        ("Saves: memory, durable", f"{totals.memory_saves}, {totals.durable_saves}", False),
        ("Uploaded", f"{size_text(totals.uploaded_bytes)}", False),
        ("Restores", str(totals.restores), False),
        ("Failed saves and uploads", str(totals.failed), totals.failed > 0),
        ("State", "running, or killed" if totals.running else "ended", False),
    ]


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.2f} s"


#: The kinds of events that the page shows.
_SHOWN = ("start", "end", "step", "save", "failed", "skipped", "upload", "restore")
_DONE = {"save": "uploaded", "part": "part uploaded", "alias": "alias set", "copy": "copied", "delete": "deleted"}


def _shown(event: Event) -> dict[str, Any]:
    """An event as the page draws it: its kind is the lane; ``small`` ones are left out of the table."""
    kind, state = str(event["event"]), str(event.get("state", ""))
    text = {"name": str(event.get("name", "")), "detail": str(event.get("error", ""))}
    shown: dict[str, Any] = {"t": event["t"], "step": _number(event, "step", -1), **text}
    if kind == "step":
        return {**shown, "kind": "run", "what": f"at step {shown['step']}", "small": True}
    if kind == "start":
        return {**shown, "kind": "run", "what": "training started"}
    if kind == "end":
        return {**shown, "kind": "run", "what": "training ended"}
    if kind == "save":
        durable, stall = bool(event.get("durable")), _number(event, "stall_s", 0.0)
        what = "saved, to be uploaded" if event.get("queued") else "saved, durable" if durable else "saved to memory"
        facts = {"stall": stall, "seconds": stall, "bytes": _number(event, "size_bytes", 0)}
        return {**shown, "kind": "memory", "what": what, "small": not durable, "big": durable, **facts}
    if kind == "restore":
        shown |= {"seconds": _number(event, "seconds", 0.0), "detail": f"from {event.get('tier', 'an unknown tier')}"}
        return {**shown, "kind": "restore", "what": "restored", "big": True}
    if kind == "upload" and state == "committed":
        seconds, action = _number(event, "seconds", 0.0), str(event.get("action", ""))
        facts = {"seconds": seconds, "bytes": _number(event, "size_bytes", 0)}
        span = {"begin": event["t"] - seconds, "end": event["t"]} if action in ("save", "part") else {}
        return {**shown, "kind": "upload", "what": _DONE.get(action, action), **facts, **span}
    if kind == "upload":
        action = str(event.get("action", ""))
        return {**shown, "kind": "failure", "what": f"{'upload' if action in ('save', 'part') else action} {state}"}
    return {**shown, "kind": "failure", "what": f"{event.get('action', 'save')} {kind}"}


def _number(event: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = event.get(name, otherwise)
    return value if isinstance(value, int | float) and math.isfinite(value) else otherwise


def _with_runs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives each start of training its span: until its end, or the last that was seen before the next start."""
    begun: dict[str, Any] | None = None
    for event in events:
        if event["what"] == "training started":
            begun = event
            event["begin"] = event["end"] = event["t"]
        elif begun is not None and event["kind"] in ("run", "memory"):
            begun["end"] = event["t"]
            if event["what"] == "training ended":
                begun = None
    return events
