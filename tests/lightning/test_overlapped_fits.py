"""Captures that overlap training: each checkpoint is the state at the moment of its save, or that save fails."""

import os

import pytest
import torch.distributed as dist
from support.overlapped_fits import Fits

#: Variables of CI, which tries a part of them.
ONE_OF, SEED = int(os.environ.get("ONE_OF") or 1), int(os.environ.get("SEED") or 0)
COUNT, AT_ONCE = 240, 20
#: Each of these finds a defect that was put into the code.
SHORT = {"full": (0, 1, 2, 5, 6, 7, 11, 16, 19, 21), "sharded": (0, 1, 2, 6, 7, 10, 16)}


@pytest.fixture
def fits(runs, monkeypatch, caplog):
    caplog.set_level("INFO", "tiered_checkpoint_io")
    yield Fits(runs, monkeypatch, caplog)
    if dist.is_initialized():
        dist.destroy_process_group()


def judged(fits, seeds, *, sharded):
    for seed in seeds:
        fits.fit(seed, sharded=sharded)
        assert not fits.defects, "\n".join(fits.defects)
    print(f"fits={len(seeds)} {dict(fits.counts)}")
    assert fits.counts["overlapped"] > len(seeds)


@pytest.mark.parametrize("kind", SHORT)
def test_each_checkpoint_of_a_training_is_the_state_at_its_save(kind, fits):
    judged(fits, SHORT[kind], sharded=kind == "sharded")


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
@pytest.mark.parametrize("first", range(AT_ONCE * (SEED % ONE_OF), COUNT, AT_ONCE * ONE_OF))
def test_many_trainings(first, sharded, fits):
    judged(fits, range(first, first + AT_ONCE), sharded=sharded)
