"""The documentation pages, with their headings, links and code blocks."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.architecture.paths import ROOT


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without code blocks and inline code."""
        return re.sub(r"`[^`\n]+`", "", re.sub(r"```.*?```", "", self.text, flags=re.DOTALL))

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        """Anchors of the headings, as GitHub and the site generate them."""
        headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", self.text, flags=re.DOTALL), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)


PAGES = [
    Page(path)
    for path in (
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "src/qkv/zoo").glob("*/card.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    )
]
