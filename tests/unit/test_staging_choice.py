"""Whether a capture overlaps training or blocks it: whichever costs less."""

import os
from types import SimpleNamespace

import torch

from tiered_checkpoint_io.callbacks import overlapping
from tiered_checkpoint_io.callbacks.staging_choice import StagingChoice


def test_the_cheaper_way_is_chosen_and_tried_again():
    choice = StagingChoice()
    for _ in range(3):
        assert not choice.overlaps, "eager saves are measured first"
        choice.note_eager(0.05)
    assert [choice.note_overlapped(0.01) for _ in range(5)] == [False] * 5
    assert choice.overlaps
    lost = [choice.note_overlapped(0.2) for _ in range(5)]
    assert lost.count(True) == 1, "said once"
    assert not choice.overlaps
    eager = 0
    while not choice.overlaps:
        choice.note_eager(0.05)
        eager += 1
    assert eager == 100


def test_cores_are_idle_where_torch_uses_fewer_also_of_many(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for threads, idle in ((16, True), (64, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert overlapping._has_idle_cores(torch.device("cpu")) == idle


def test_the_wait_for_the_durable_tier_is_no_cost_of_a_capture():
    seen = []
    capture = overlapping.OverlappedCapture.__new__(overlapping.OverlappedCapture)
    capture._choice = SimpleNamespace(note_eager=seen.append)
    capture._overlap, capture._begun, capture._report = SimpleNamespace(newest=None), None, None
    for stall_s, is_durable in ((1.0, False), (2.0, True), (3.0, False)):
        report = SimpleNamespace(stall_s=stall_s, overlapped=False, is_durable=is_durable)
        capture._session = SimpleNamespace(last_save=report)
        capture._note_save()
    assert seen == [1.0, 3.0]
