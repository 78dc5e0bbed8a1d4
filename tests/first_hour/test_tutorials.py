"""The pages of docs/tutorials, from top to bottom: their files are written, their commands run, and their lines printed."""

import ast
from pathlib import Path

import pytest
from support.first_hour import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs/tutorials").glob("*.md") if page.name != "index.md")
#: Those that stand for the others in `make test`.
SHORT = {"lora"}


def of(page):
    """The blocks of a page: language, title and text."""
    for _, info, text in blocks_of(page.read_text()):
        language, _, title = info.partition(" title=")
        yield language, title.strip('"'), text


def run(story, line):
    """Runs one line of a page; gives what it printed."""
    command, _, comment = line.partition("#")
    program, *arguments = command.split()
    if program == "torchrun":
        _, ranks, script, *arguments = arguments
        output, status = story.python(script, *arguments, ranks=int(ranks))
    elif program == "python":
        output, status = story.python(*arguments)
    else:
        assert program == "tiered-ckpt", line
        story.drained()
        output, status = story.tiered_ckpt(*arguments)
    assert status == (None if "killed" in comment else 0), f"{line}\n{output[-3000:]}"
    return output


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=() if page.stem in SHORT else pytest.mark.matrix) for page in PAGES],
)
def test_a_tutorial_does_what_it_says(page, story):
    output = ""
    for language, title, text in of(page):
        if title == "prints":
            assert [line for line in text.splitlines() if line not in output.splitlines()] == [], output[-3000:]
        elif title:
            (story.folder / title).write_text(text)
        elif language == "bash":
            output = "".join(run(story, line) for line in text.splitlines())
        else:
            raise AssertionError(f"{page.name}: a block of {language} that nothing runs")


def test_every_tutorial_is_python():
    """Cheap, for those that `make test` does not run."""
    for page in PAGES:
        blocks = list(of(page))
        for language, _, text in blocks:
            if language == "python":
                ast.parse(text, page.name)
        assert any(language == "bash" for language, _, _ in blocks), page.name
    assert {page.stem for page in PAGES} >= SHORT
