"""Pages of the site beside ``docs/``: other pages of the repository, and the sources that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
#: Pages outside ``docs/``, by their place in the repository.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    # Not deploy/index.md: such a page has no line of its own in the menu.
    "deploy/README.md": "deployment.md",
}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash", ".json": "json"}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
#: Origin in the repository of each page of the site.
_ORIGINS = {site: origin for origin, site in PAGES.items()}


def on_config(config: Any) -> Any:
    """Puts pages that the menu does not name after the guides."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | set(PAGES.values())
    (guides,) = [each["Guides"] for each in config.nav if "Guides" in each]
    guides += sorted(pages - named)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside ``docs/``, and one page for each source file that any page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {origin: (ROOT / origin).read_text() for origin in PAGES}
    for origin, site in PAGES.items():
        files.append(File.generated(config, site, content=texts[origin]))
    for source in sorted({target for origin, text in texts.items() for target in _sources(origin, text)}):
        files.append(File.generated(config, _shown_at(source), content=_page_of(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links to files of the repository at their pages on the site."""
    site = page.file.src_uri
    if site.startswith("source/"):
        return markdown
    origin = _ORIGINS.get(site, f"docs/{site}")

    def here(match: re.Match[str]) -> str:
        target = _target(origin, match[2])
        if target is None:
            return match[0]
        shown = posixpath.relpath(_site_of(target), posixpath.dirname(site) or ".")
        return f"{match[1]}{shown}{match[3] or ''}{match[4]}"

    return _LINK.sub(here, markdown)


def _target(origin: str, link: str) -> str | None:
    """The place in the repository that a link names; None for a link to anywhere else."""
    if ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _site_of(target: str) -> str:
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    readme = posixpath.join(target, "README.md")
    return PAGES.get(target) or PAGES.get(readme) or _shown_at(target)


def _sources(origin: str, text: str) -> set[str]:
    targets = {_target(origin, match[2]) for match in _LINK.finditer(text)}
    return {each for each in targets if each is not None and _site_of(each).startswith("source/")}


def _shown_at(source: str) -> str:
    return f"source/{source}/index.md" if (ROOT / source).is_dir() else f"source/{source}.md"


def _page_of(source: str) -> str:
    path = ROOT / source
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    blocks = [
        f"## {each.name}\n\n````{_LANGUAGES.get(each.suffix, 'text')}\n{each.read_text()}````\n" for each in files
    ]
    return "\n".join([f"# {source}\n", *blocks])
