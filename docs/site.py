"""What the site has beside the pages of this folder: notebooks, model cards, results, every command's help.

They are made from where they live, each time the site is built, so that nothing stands twice. A link out of this folder
goes to the page made of that file; where there is none, its words stay and the link goes.
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
WIDE = ("mission.md", "results.md")
"""Their tables need the room."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page that nobody put into the navigation stands at the end of "Under the hood"."""
    named = {name for part in config.nav or [] for names in part.values() for name in names}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    under_the_hood = next(part["Under the hood"] for part in config.nav or [] if "Under the hood" in part)
    under_the_hood += sorted(pages - named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for card in sorted(ZOO.glob("*/card.md")):
        _, _, told = card.read_text(encoding="utf-8").split("---\n", 2)  # what stands before is for `qkv models`
        add(f"cards/{card.parent.name}/index.md", told)
        add(f"cards/{card.parent.name}/curve.png", (card.parent / "curve.png").read_bytes())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page, pictures = page_of(path)
        add(f"notebooks/{path.stem}.md", page)
        for name, content in pictures.items():
            add(f"notebooks/{name}", content)
    add("results.md", (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8"))
    add("commands.md", commands())
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs gives more than we use
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "results.md":
        markdown = markdown.replace("](../docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    return LINK_OUT.sub(lambda found: inside(found, up), markdown)


LINK_OUT = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?:\.\./)+((?:notebooks|benchmarks|src|tests|recipes|docs)/[^)]+|\w+\.md)\)"
)


def inside(found: re.Match[str], up: str) -> str:
    """The link to the page made of that file, or its words alone."""
    words, path = found[1], found[2]
    if path.startswith("docs/"):
        return f"[{words}]({up}{path.removeprefix('docs/')})"
    if path.startswith("notebooks/"):
        return f"[{words}]({up}{path.removesuffix('.ipynb')}.md)"
    if path == "benchmarks/RESULTS.md":
        return f"[{words}]({up}results.md)"
    if card := re.fullmatch(r"src/qkv/zoo/([\w-]+)/card\.md", path):
        return f"[{words}]({up}cards/{card[1]}/index.md)"
    # Another page of the site, or a file that the site does not show.
    return found[0] if (ROOT / "docs" / path).is_file() else words


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = source.replace("](../docs/pictures/", "](../pictures/")
            parts.append(re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            shown = output.get("data", {})
            if "image/png" in shown:
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(shown["image/png"]))
                parts.append(f"![what the cell above draws]({name})")
            elif text := "".join(output.get("text") or shown.get("text/plain") or ""):
                parts.append(f"```text\n{text.strip(chr(10))}\n```")
    return "\n\n".join(parts) + "\n", pictures


def commands() -> str:
    """`--help` of every command, as the terminal shows it."""
    import typer

    from qkv.cli import app

    told = ["# Commands", "What `qkv COMMAND --help` says, of this version."]
    whole = _context(typer.main.get_command(app), "qkv")
    for name, command in whole.command.commands.items():
        own = _context(command, name, whole)
        told.append(f"## qkv {name}\n\n{_help(own)}")
        for inner, its in getattr(command, "commands", {}).items():
            told.append(f"### qkv {name} {inner}\n\n{_help(_context(its, inner, own))}")
    return "\n\n".join(told) + "\n"


def _context(command: Any, name: str, parent: Any = None) -> Any:  # noqa: ANN401 - typer's own kind of click
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    context.max_content_width = context.terminal_width = 96
    return context


def _help(context: Any) -> str:  # noqa: ANN401
    return f"```text\n{context.command.get_help(context).strip()}\n```"
