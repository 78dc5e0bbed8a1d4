"""Tests with NeMo itself; if it is not installed (``make test-nemo`` has it) there are none."""

import importlib.util
import warnings

import pytest

# By a module of NeMo's own: this folder passes for a package.
HAVE_NEMO = importlib.util.find_spec("nemo") is not None and importlib.util.find_spec("nemo.utils") is not None
collect_ignore_glob = [] if HAVE_NEMO else ["test_*.py"]

if HAVE_NEMO:
    with warnings.catch_warnings():
        # NeMo's imports, and what those import, warn of much.
        warnings.simplefilter("ignore")
        import tiered_checkpoint_io.nemo  # noqa: F401

#: NeMo's own, and that of what it imports.
THEIRS = ["ignore:::nemo.*", "ignore:::nv_one_logger.*", "ignore::DeprecationWarning:omegaconf.*"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/nemo/" in str(item.path):
            for each in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(each))


@pytest.fixture(autouse=True)
def _fresh_nemo(monkeypatch, tmp_path):
    """Resets NeMo's state, which is in the environment and in the working directory."""
    from nemo.utils.app_state import AppState

    monkeypatch.delenv("NEMO_EXPM_VERSION", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    AppState().__init__()


@pytest.fixture
def runs(s3_url, memory_dir, tmp_path):
    from support.nemo_training import NeMoRuns

    return NeMoRuns(f"{s3_url}/checkpoints", memory_dir, tmp_path / "logs")
