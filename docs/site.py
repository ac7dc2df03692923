"""MkDocs hooks that add generated pages to the site: notebooks, model cards, benchmark results and command help.

Each build generates these pages from their source files, so that no content is duplicated. Links to files outside this
folder are rewritten to point to the generated pages. If a file has no page, the link is replaced by its text.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ZOO = ROOT / "src/qkv/zoo"
WIDE_PAGES = ("mission.md", "results.md")
"""Pages without a table of contents, because their tables need the full width."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append pages that are missing from the navigation to the section "Under the hood"."""
    in_navigation = {name for section in config.nav or [] for names in section.values() for name in names}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    under_the_hood = next(section["Under the hood"] for section in config.nav or [] if "Under the hood" in section)
    under_the_hood += sorted(pages - in_navigation)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and their images."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for card in sorted(ZOO.glob("*/card.md")):
        # The front matter of a card is metadata for `qkv models`.
        _, _, text = card.read_text(encoding="utf-8").split("---\n", 2)
        add(f"cards/{card.parent.name}/index.md", text)
        add(f"cards/{card.parent.name}/curve.png", (card.parent / "curve.png").read_bytes())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page, images = notebook_to_markdown(path)
        add(f"notebooks/{path.stem}.md", page)
        for name, content in images.items():
            add(f"notebooks/{name}", content)
    add("results.md", (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8"))
    add("commands.md", command_help_page())
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs passes other arguments
    """Rewrite the links of a page and hide the table of contents of wide pages."""
    if page.file.src_uri in WIDE_PAGES:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "results.md":
        markdown = markdown.replace("](../docs/", "](")
    root = "../" * page.file.src_uri.count("/")
    return EXTERNAL_LINK.sub(lambda link: rewrite_link(link, root), markdown)


EXTERNAL_LINK = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?:\.\./)+((?:notebooks|benchmarks|src|tests|recipes|docs)/[^)]+|\w+\.md)\)"
)
"""A link to a file of the repository outside the docs folder, except images."""


def rewrite_link(link: re.Match[str], root: str) -> str:
    """Return a link to the generated page of the file, or only the link text if there is no such page.

    `root` is the relative path from the page to the root of the site.
    """
    text, path = link[1], link[2]
    if path.startswith("docs/"):
        return f"[{text}]({root}{path.removeprefix('docs/')})"
    if path.startswith("notebooks/"):
        return f"[{text}]({root}{path.removesuffix('.ipynb')}.md)"
    if path == "benchmarks/RESULTS.md":
        return f"[{text}]({root}results.md)"
    if card := re.fullmatch(r"src/qkv/zoo/([\w-]+)/card\.md", path):
        return f"[{text}]({root}cards/{card[1]}/index.md)"
    # Other pages of the site are linked directly, and other files of the repository are not on the site.
    return link[0] if (ROOT / "docs" / path).is_file() else text


def notebook_to_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook to Markdown. Return the page and a dict that maps file names to the images of the notebook."""
    parts, images = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = source.replace("](../docs/pictures/", "](../pictures/")
            parts.append(re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(images)}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif text := "".join(output.get("text") or data.get("text/plain") or ""):
                parts.append(f"```text\n{text.strip(chr(10))}\n```")
    return "\n\n".join(parts) + "\n", images


def command_help_page() -> str:
    """Return a page with the `--help` output of every command."""
    import typer

    from qkv.cli import app

    sections = ["# Commands", "This page contains the `--help` output of every `qkv` command."]
    root = _click_context(typer.main.get_command(app), "qkv")
    for name, command in root.command.commands.items():
        context = _click_context(command, name, root)
        sections.append(f"## qkv {name}\n\n{_help_block(context)}")
        for subname, subcommand in getattr(command, "commands", {}).items():
            subcontext = _click_context(subcommand, subname, context)
            sections.append(f"### qkv {name} {subname}\n\n{_help_block(subcontext)}")
    return "\n\n".join(sections) + "\n"


def _click_context(command: Any, name: str, parent: Any = None) -> Any:  # noqa: ANN401 - typer has no public type
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    context.max_content_width = context.terminal_width = 96
    return context


def _help_block(context: Any) -> str:  # noqa: ANN401
    return f"```text\n{context.command.get_help(context).strip()}\n```"
