"""The pages: each link leads to a file that exists, and to a heading of it where it names one."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "demo" / "models" / "README.md", *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    names, seen = set(), Counter()
    for heading in re.findall(r"^#+ +(.*)$", FENCED.sub("", page.read_text()), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_names_of_headings(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# `--flag`: a *thing*\n## SFI's one\n## SFI's one\n```\n# no heading\n```\n")
    assert anchors(page) == {"--flag-a-thing", "sfis-one", "sfis-one-1"}
