"""docs/lightning.md as a whole: each of its sections is a file of tests beside this one."""

import re
from pathlib import Path

from support.as_lightning import sections


def test_each_section_of_the_document_has_its_file_of_tests_and_the_reverse():
    files = Path(__file__).parent.glob("test_as_lightning_*.py")
    assert sorted(re.search(r'Topic\("(.+)"\)', file.read_text())[1] for file in files) == sorted(sections())


def test_no_behaviour_is_listed_twice():
    rows = [row for section in sections().values() for row, _ in section]
    assert sorted(rows) == sorted(set(rows))
