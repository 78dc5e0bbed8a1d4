"""Fixtures for trainings: one job on a directory, on S3, or on each."""

import pytest
from support.training import Runs


@pytest.fixture
def runs(tmp_path, memory_dir):
    return Runs(str(tmp_path / "durable"), memory_dir, tmp_path)


@pytest.fixture(params=[pytest.param("directory", marks=pytest.mark.matrix), "s3"])
def runs_on_each(request, tmp_path, memory_dir):
    dirpath = request.getfixturevalue("s3_url") if request.param == "s3" else str(tmp_path / "durable")
    return Runs(dirpath, memory_dir, tmp_path)
