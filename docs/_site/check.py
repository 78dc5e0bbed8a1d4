"""Looks through a built site for what a browser would fetch from another host; takes the site's folder."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

#: Attributes that load without a click, by element: all but links to follow.
_LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "link": "href",
    "source": "src",
    "video": "src",
    "object": "data",
}
_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        target = given.get(_LOADED.get(tag, "")) or ""
        if given.get("rel") != "canonical" and target.startswith(("http:", "https:", "//")):
            self.fetched.append(target)
        if "mermaid" in (given.get("class") or "").split():
            # The theme fetches what draws these.
            self.fetched.append("unpkg.com/mermaid")


def main(site: Path) -> None:
    """Ends with status 1, and a line for each fault, if there is one."""
    pages = sorted(site.rglob("*.html"))
    wrong = [] if len(pages) > 20 else [f"{site}: only {len(pages)} pages"]
    for page in pages:
        parser = _Page()
        parser.feed(page.read_text())
        wrong += [f"{page}: fetches {target}" for target in parser.fetched]
    for style in sorted(site.rglob("*.css")):
        wrong += [f"{style}: fetches {target}" for target in _STYLE.findall(style.read_text())]
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"pages={len(pages)} fetched_from_elsewhere=0")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
