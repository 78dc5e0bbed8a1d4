"""The blocks of the pages about other frameworks, word for word, twice: the second time they resume."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.first_hour import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
#: By page and heading: what the block needs beyond this package.
BLOCKS = {
    ("fabric.md", "Lightning Fabric"): "lightning",
    ("ray.md", "Ray Train"): "torch",
}
FOUND = {
    (page, heading): text
    for page in sorted({page for page, _ in BLOCKS})
    for heading, language, text in blocks_of((DOCS / page).read_text())
    if language == "python"
}


def test_every_block_is_run():
    assert set(FOUND) == set(BLOCKS)


#: Blocks whose promise another test covers in `make test`.
FURTHER = {"Ray Train"}


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(each, marks=[pytest.mark.matrix] if each[1] in FURTHER else [], id="-".join(each))
        for each in BLOCKS
    ],
)
def test_a_block_runs_and_resumes(block, story):
    if find_spec(BLOCKS[block]) is None:
        pytest.skip(f"{BLOCKS[block]} is not installed")
    (story.folder / "block.py").write_text(FOUND[block])
    for start in ("first", "second"):
        output, status = story.python("block.py")
        assert status == 0, output[-3000:]
        assert "Traceback" not in output
        assert ("resuming from step" in output) == (start == "second"), output[-3000:]
