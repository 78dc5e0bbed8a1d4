"""The record of events: what it adds up to, its bound, and that it is no burden to anything."""

import os

import pytest
from support.tenants import Tenant, mounted_tmpfs

from tiered_checkpoint_io.engine.drain.events import EVENTS_FILE, note, read_events
from tiered_checkpoint_io.model.events import totals_of


def at(t, event, **facts):
    return {"t": float(t), "event": event, **facts}


def save(t, step, *, durable=False, queued=False, stall=0.5):
    facts = {"name": f"step={step}.ckpt", "size_bytes": 100, "stall_s": stall, "capture_s": stall / 2}
    return at(t, "save", step=step, durable=durable, queued=queued, **facts)


def uploaded(t, step, created, state="committed", action="save"):
    facts = {"action": action, "size_bytes": 100, "seconds": 2.0, "error": ""}
    return at(t, "upload", name=f"step={step}.ckpt", step=step, state=state, created=float(created), **facts)


KILLED = [
    at(1000, "start", step=0),
    save(1010, 10),
    save(1020, 20, durable=True, queued=True),
    uploaded(1023, 20, 1020, state="failed"),
    uploaded(1025, 20, 1020),
    save(1030, 30),
    at(1045, "step", step=45),
]


def test_what_a_run_that_was_killed_and_went_back_has_lost():
    dead = totals_of(KILLED)
    assert (dead.running, dead.step, dead.durable_step, dead.durable_at) == (True, 45, 20, 1020)
    assert (dead.memory_saves, dead.durable_saves, dead.stall_s, dead.capture_s) == (2, 1, 1.5, 0.75)
    assert (dead.uploads, dead.uploaded_bytes, dead.upload_s, dead.failed) == (1, 100, 2.0, 1)
    # An evaluation loads a checkpoint: no step is repeated by that.
    loaded = at(1100, "restore", name="step=30.ckpt", step=30, tier="memory", seconds=3.0, created=1030.0)
    assert totals_of([*KILLED, loaded]).repeated_steps == 0
    back = totals_of([*KILLED, loaded, at(1101, "start", step=30), at(1116, "step", step=45)])
    assert (back.restores, back.restore_s) == (1, 3.0)
    assert (back.repeated_steps, back.repeated_s) == (15, 15.0)
    ended = totals_of([*KILLED, loaded, at(1101, "start", step=30), at(1131, "end", step=60, error="")])
    assert (ended.running, ended.step, ended.repeated_steps) == (False, 60, 15)
    assert totals_of([*KILLED, at(1046, "end", step=46, error="OSError")]).running


def restored(t, step, created, tier="durable"):
    return at(t, "restore", name=f"step={step}.ckpt", step=step, tier=tier, seconds=3.0, created=float(created))


def test_the_age_of_what_is_durable_is_training_time():
    # 25 s since the checkpoint of 1020 was captured. Neither uploads nor loads are training.
    dead = totals_of([*KILLED, uploaded(1900, 12, 900), restored(1950, 20, 1020)])
    assert (dead.durable_age_s, dead.active_at) == (25, 1045)
    # Training resumes a day later, from memory: the pause does not count.
    resumed = [*KILLED, restored(90_000, 30, 1030, "memory"), at(90_001, "start", step=30), at(90_016, "step", step=45)]
    assert (totals_of(resumed).durable_age_s, totals_of(resumed).active_at) == (40, 90_016)
    # An evaluation during the training loads one.
    assert totals_of([*resumed, restored(90_020, 20, 1020), at(90_031, "step", step=60)]).durable_age_s == 55
    # A save after the end, and one a day later, are no training in between.
    ended = [*resumed, at(90_020, "end", step=50, error=""), save(90_021, 50), save(180_000, 50)]
    assert totals_of(ended).durable_age_s == 44
    # A custom loop notes only saves and loads.
    loop = [save(1000, 10), save(1030, 20), restored(90_000, 20, 1030, "memory"), save(90_010, 30), save(90_050, 40)]
    assert totals_of(loop).durable_age_s == 70


def test_a_save_after_the_end_of_a_training_does_not_set_it_running():
    trained = [at(1000, "start", step=0), at(1010, "end", step=10, error="")]
    assert not totals_of([*trained, save(1011, 10, durable=True, queued=True)]).running
    assert totals_of([*trained, at(1020, "start", step=10)]).running
    assert totals_of([save(1011, 10)]).running, "a loop of one's own notes no start"


def test_after_a_rollback_the_resumed_checkpoint_is_the_durable_one():
    far = [at(1000, "start", step=0), save(1300, 300, durable=True, queued=True), uploaded(1305, 300, 1300)]
    far += [save(1500, 500, durable=True, queued=True), uploaded(1505, 500, 1500), at(1510, "step", step=510)]
    back = totals_of([*far, restored(1600, 300, 1300), at(1601, "start", step=300), at(1616, "step", step=315)])
    assert (back.durable_step, back.durable_at, back.durable_age_s) == (300, 1300, 15)
    # If an evaluation loads it, training has not gone back; nor if another training begins.
    for others in ([at(1615, "step", step=520)], [at(1615, "start", step=0)], [at(1615, "start", step=510)]):
        assert totals_of([*far, restored(1600, 300, 1300), *others]).durable_step == 500
    assert totals_of([*far, restored(1600, 300, 1300), save(1610, 310)]).durable_step == 300, "a loop of one's own"
    # A save in the background is noted after later steps.
    late = [restored(900, 100, 800), at(901, "start", step=100), *far[1:], save(1512, 505)]
    assert totals_of(late).durable_step == 500


def test_failures_of_saves_and_uploads_are_counted_apart_from_all_others():
    tried = [uploaded(1, 1, 0, "failed", action) for action in ("save", "part", "alias", "delete", "retain")]
    called = [at(2, "failed", step=1, action=action) for action in ("save", "save", "removal")]
    totals = totals_of([*tried, *called])
    assert (totals.failed, totals.failed_other) == (4, 4)


def test_what_becomes_durable_counts_after_a_clock_was_ahead():
    ahead = [save(9000, 10, durable=True, queued=True), uploaded(9005, 10, 9000)]
    later = [save(1020, 20, durable=True, queued=True), uploaded(1025, 20, 1020)]
    for before in (
        [*ahead, at(1000, "step", step=15)],
        # Of another machine.
        [at(1000, "restore", name="step=10.ckpt", step=10, tier="durable", seconds=3.0, created=9000.0)],
    ):
        totals = totals_of(before)
        assert (totals.durable_step, totals.durable_at) == (10, 1000)
        # One that was captured earlier, and comes late, is not the last.
        totals = totals_of([*before, *later, uploaded(1030, 12, 1010)])
        assert (totals.durable_step, totals.durable_at) == (20, 1020)


def test_the_record_is_bounded_and_its_totals_stay(tmp_path):
    facts = {key: value for key, value in save(0, 1).items() if key not in ("t", "event", "name")}
    for _ in range(7000):
        note(tmp_path, "save", name="x" * 290, **facts)
    assert (tmp_path / EVENTS_FILE).stat().st_size < 2 << 20
    assert len(read_events(tmp_path)) < 6000
    assert totals_of(read_events(tmp_path)).memory_saves == 7000
    assert os.stat(tmp_path / EVENTS_FILE).st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
    note(tmp_path, "step", step=1)
    with open(tmp_path / EVENTS_FILE, "ab") as file:
        file.write(b'\n{"t":5,"event":"st')
    note(tmp_path, "step", step=2, error="x" * 10_000)
    assert [each["step"] for each in read_events(tmp_path)] == [1, 2]
    assert len(read_events(tmp_path)[1]["error"]) == 300


def test_without_a_folder_nothing_happens(tmp_path):
    note(tmp_path / "cleaned", "step", step=1)
    assert read_events(tmp_path / "cleaned") == []


@pytest.mark.matrix
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_on_a_full_tmpfs_lines_are_missing_and_nothing_else(tmp_path):
    with mounted_tmpfs(tmp_path, size=64 << 10) as folder:
        tenant = Tenant(folder)
        note(folder, "step", step=1)
        tenant.fills()
        for step in range(2, 500):
            note(folder, "step", step=step)
        tenant.goes()
        note(folder, "step", step=500)
        steps = [each["step"] for each in read_events(folder)]
        assert (steps[0], steps[-1], len(steps) < 500) == (1, 500, True)
