"""Each message that docs/troubleshooting.md quotes is one of the code's."""

import re

from support.messages import ROOT, has_message


def test_each_quoted_message_exists():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 30
    assert [each for each in quoted if not has_message(each)] == []
