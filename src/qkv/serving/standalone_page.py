"""The page as one file that opens from disk: script, style and recorded answers written into it."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "page"
NOT_BUILT = (
    "The page is not built: this copy of qkv has the server alone. Build it with Node: make page "
    "(its source is explorer/). The API answers all the same."
)
_SCRIPT = re.compile(r"<script\b([^>]*)\bsrc=\"\./?([^\"]+)\"([^>]*)></script>")
_STYLE = re.compile(r"<link\b[^>]*\brel=\"stylesheet\"[^>]*\bhref=\"\./?([^\"]+)\"[^>]*>")
_OTHER = re.compile(r"<link\b[^>]*>")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One answer, with what was asked."""

    path: str
    body: dict[str, Any] | None
    status: int
    type: str
    answer: bytes


def is_built(page: Path | None = None) -> bool:
    """`page`: another folder than the package's own."""
    return ((page or PAGE) / "index.html").is_file()


def index(page: Path | None = None) -> str:
    """The page itself; where it is not built, a line that says so."""
    if is_built(page):
        return ((page or PAGE) / "index.html").read_text(encoding="utf-8")
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>qkv</title><p>{NOT_BUILT}</p></html>'


def single_file(answers: Sequence[Recorded], *, state: str = "", live: bool = False) -> str:
    """`live`: what is not among the answers may be asked of whoever embeds the file."""
    data = json.dumps({
        "state": state, "live": live,
        "answers": [
            {"path": one.path, "body": one.body, "status": one.status, "type": one.type,
             "answer": base64.b64encode(one.answer).decode()}
            for one in answers
        ],
    })  # fmt: skip
    scripts: list[str] = []
    styles: list[str] = []

    def script(match: re.Match[str]) -> str:
        # In JavaScript strings \x3c is <; the end of an element must not stand inside it.
        code = (
            (PAGE / match[2])
            .read_text(encoding="utf-8")
            .replace("</script", "\\x3c/script")
            .replace("<!--", "\\x3c!--")
        )
        scripts.append(code)
        return ""

    def style(match: re.Match[str]) -> str:
        styles.append((PAGE / match[1]).read_text(encoding="utf-8").replace("</style", "<\\/style"))
        return ""

    text = _OTHER.sub("", _STYLE.sub(style, _SCRIPT.sub(script, index())))
    # Written as text inside a script that does not run: < alone could end it.
    safe = data.replace("<", "\\u003c")
    held = f'<script type="application/json" id="qkv-data">{safe}</script>'
    head = _policy(scripts, styles) + "".join(f"<style>{one}</style>" for one in styles)
    tail = held + "".join(f'<script type="module">{one}</script>' for one in scripts)
    text = _after(text, r"<meta\s+charset=[^>]*>", head)
    return _before(text, "</body>", tail) if "</body>" in text else text + tail


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Nothing but these very scripts and styles, and no request to anywhere."""
    rules = {"script-src": scripts, "style-src": styles}
    named = "; ".join(
        " ".join([rule, *map(_hash, found)] if found else [rule, "'none'"]) for rule, found in rules.items()
    )
    content = f"default-src 'none'; {named}; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _after(text: str, pattern: str, added: str) -> str:
    found = re.search(pattern, text)
    return text[: found.end()] + added + text[found.end() :] if found else added + text


def _before(text: str, mark: str, added: str) -> str:
    at = text.rindex(mark)
    return text[:at] + added + text[at:]
