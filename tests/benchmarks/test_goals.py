"""The benchmarks measure parts of saves and loads by the names of functions: each is still there."""

from pathlib import Path


def test_the_parts_of_a_save_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from parts import OF_DCP_LOAD, OF_LOAD, OF_SAVE, OF_SHARDED, Parts

    for functions in (OF_SAVE, OF_LOAD, OF_DCP_LOAD, OF_SHARDED):
        for part, paths in functions.items():
            for path in paths:
                with Parts({part: [path]}) as found:
                    assert found.seconds == {part: 0.0}, f"{path} is gone"
