"""Code from the documents of other libraries runs here, except imports, buckets and devices."""

import re
from pathlib import Path

import pytest
from support.launch import launch, said

WORKER = Path(__file__).with_name("blocks_worker.py")
DEADLINE_S = 170.0
RANKS = 2
#: Their loops have 1000 steps.
long = pytest.mark.matrix


@pytest.fixture
def block(s3_url, s3_bucket, memory_dir, tmp_path, monkeypatch):
    """Runs blocks of a document on two ranks; returns their answers."""
    monkeypatch.setenv("TRAINING_JOB_NAME", "blocks")

    def run(document, scenario, **options):
        bases = ("my-bucket/checkpoints", "my-training-bucket/checkpoints", "bucket/checkpoints")
        bases = (*bases, "bucket-name/checkpointing-path-prefix/")
        places = {f"s3://{base}": s3_url for base in bases} | {"/opt/ml/checkpoints": str(tmp_path / "opt")}
        job = {"document": document, "scenario": scenario, "places": places, "base": s3_url}
        job |= {"nemo": ["s3://bucket/checkpoints", s3_url]}
        job |= {"options": {"memory_dir": memory_dir, **options}, "bucket": s3_bucket, "key": "smp"}
        answers = launch(tmp_path, [job] * RANKS, deadline_s=DEADLINE_S, worker=WORKER)
        for rank, answer in enumerate(answers):
            assert answer is not None, said(tmp_path, rank)
        return answers

    return run


@long
def test_the_blocks_of_the_sagemaker_library(block):
    for answer in block("sagemaker_library", "library"):
        assert "Failure" not in answer["said"]
        assert "failed" not in answer["said"]
        assert answer["loaded"] == [[990, 4, True], [500, 4, True]]
        assert [step for step, _ in answer["found"]] == [2002, 2003, 2004]
        # The second is memory-only.
        paths = [path for _, path in answer["found"][::2]]
        assert paths == [f"/blocks/any/path/here/step_{step}" for step in (2001, 2003)]


@long
def test_the_complete_example_of_the_sagemaker_library_and_its_restart(block):
    for answer in block("sagemaker_library", "complete"):
        assert "No checkpoint found, starting from scratch" in answer
        assert "Failure" not in answer
    for answer in block("sagemaker_library", "complete"):
        # The example ends its process group without waiting for its last save, which may be lost.
        assert re.search("Resumed training from step 9[89]1", answer), answer


def test_the_blocks_of_managed_tier_checkpointing(block):
    for answer in block("hyperpod", "hyperpod"):
        assert answer == [[[5.0] * 3, False], [[100.0] * 3, True]]


def test_the_blocks_of_the_model_parallelism_library(block, tmp_path):
    for answer in block("smp", "smp", dirpath=str(tmp_path / "opt")):
        assert answer == {"local": [True, True], "sharded": True}


def test_the_blocks_of_nemo(block):
    for answer in block("nemo", "nemo"):
        assert answer == [[0, 3], [3, 5]]
