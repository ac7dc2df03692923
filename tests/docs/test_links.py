"""No page, card or notebook has a link that leads nowhere."""

import json

import pytest

from tests.docs.pages import PAGES, ROOT, Page

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def dead_links(page: Page) -> list[str]:
    dead = []
    for link in page.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        # Notebooks become pages of the site; there they are Markdown.
        target = (page.path.parent / path).resolve() if path else page.path
        if path.startswith(("notebooks/", "../notebooks/")) and path.endswith(".md"):
            target = ROOT / "notebooks" / (target.stem + ".ipynb")
        is_made = path in ("commands.md", "results.md") and page.path.parent == ROOT / "docs"
        is_there = target.exists() or is_made
        if not is_there or (anchor and target.suffix == ".md" and anchor not in Page(target).anchors):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    assert dead_links(page) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_every_link_of_a_notebook_leads_somewhere(path):
    cells = json.loads(path.read_text())["cells"]
    told = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    page = Page(path)
    object.__setattr__(page, "text", told)
    assert [link for link in page.links if "://" not in link and not (path.parent / link).exists()] == []


def test_a_dead_link_is_seen_and_code_is_none(tmp_path):
    (tmp_path / "a.md").write_text("# A heading\n[b](b.md) [c](#a-heading) [d](#no-heading) [e](a.md#x) `[f](f.md)`\n")
    assert dead_links(Page(tmp_path / "a.md")) == ["b.md", "#no-heading", "a.md#x"]
