"""Pages, model cards and notebooks have no broken links."""

import json

import pytest

from tests.docs.pages import PAGES, ROOT, Page

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def find_broken_links(page: Page) -> list[str]:
    broken = []
    for link in page.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        # The site converts notebooks to Markdown pages.
        target = (page.path.parent / path).resolve() if path else page.path
        if path.startswith(("notebooks/", "../notebooks/")) and path.endswith(".md"):
            target = ROOT / "notebooks" / (target.stem + ".ipynb")
        is_generated = path in ("commands.md", "results.md") and page.path.parent == ROOT / "docs"
        exists = target.exists() or is_generated
        if not exists or (anchor and target.suffix == ".md" and anchor not in Page(target).anchors):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_broken_links(page):
    assert find_broken_links(page) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_has_no_broken_links(path):
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    page = Page(path)
    object.__setattr__(page, "text", text)
    assert [link for link in page.links if "://" not in link and not (path.parent / link).exists()] == []


def test_broken_links_are_found_and_code_is_ignored(tmp_path):
    (tmp_path / "a.md").write_text("# A heading\n[b](b.md) [c](#a-heading) [d](#no-heading) [e](a.md#x) `[f](f.md)`\n")
    assert find_broken_links(Page(tmp_path / "a.md")) == ["b.md", "#no-heading", "a.md#x"]
