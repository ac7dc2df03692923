"""Build the page as a standalone HTML file that contains its script, its style and the recorded responses."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_NOT_BUILT = (
    "The explorer page has not been built. To build it, run `make page`, which requires Node. The API works without "
    "the page."
)
_SCRIPT = re.compile(r"<script\b([^>]*)\bsrc=\"\./?([^\"]+)\"([^>]*)></script>")
_STYLESHEET = re.compile(r"<link\b[^>]*\brel=\"stylesheet\"[^>]*\bhref=\"\./?([^\"]+)\"[^>]*>")
_OTHER_LINK = re.compile(r"<link\b[^>]*>")


@dataclass(frozen=True, kw_only=True)
class RecordedResponse:
    """An API request and its recorded response."""

    path: str
    body: dict[str, Any] | None
    status: int
    content_type: str
    response: bytes


def is_page_built(page_folder: Path | None = None) -> bool:
    """Return whether the built page exists in `page_folder`, which defaults to the folder in the package."""
    return ((page_folder or PAGE_FOLDER) / "index.html").is_file()


def index_html_or_notice(page_folder: Path | None = None) -> str:
    """Return the HTML of the page, or a short notice if the page has not been built."""
    if is_page_built(page_folder):
        return ((page_folder or PAGE_FOLDER) / "index.html").read_text(encoding="utf-8")
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>qkv</title><p>{PAGE_NOT_BUILT}</p></html>'


def build_standalone_page(responses: Sequence[RecordedResponse], *, state: str = "", live: bool = False) -> str:
    """Embed responses in the page.

    If `live` is true, the page can request other responses from the window that embeds it.
    """
    data = json.dumps(
        {
            "state": state,
            "live": live,
            "responses": [
                {
                    "path": recorded.path,
                    "body": recorded.body,
                    "status": recorded.status,
                    "content_type": recorded.content_type,
                    "response": base64.b64encode(recorded.response).decode(),
                }
                for recorded in responses
            ],
        }
    )
    scripts: list[str] = []
    styles: list[str] = []

    def extract_script(match: re.Match[str]) -> str:
        # \x3c is < in JavaScript strings. The script must not contain its own end tag.
        code = (
            (PAGE_FOLDER / match[2])
            .read_text(encoding="utf-8")
            .replace("</script", "\\x3c/script")
            .replace("<!--", "\\x3c!--")
        )
        scripts.append(code)
        return ""

    def extract_style(match: re.Match[str]) -> str:
        styles.append((PAGE_FOLDER / match[1]).read_text(encoding="utf-8").replace("</style", "<\\/style"))
        return ""

    text = _OTHER_LINK.sub("", _STYLESHEET.sub(extract_style, _SCRIPT.sub(extract_script, index_html_or_notice())))
    # The data is stored in a script element that is not executed. An unescaped < could close the element.
    safe = data.replace("<", "\\u003c")
    data_element = f'<script type="application/json" id="qkv-data">{safe}</script>'
    head = _content_security_policy_meta(scripts, styles) + "".join(f"<style>{style}</style>" for style in styles)
    tail = data_element + "".join(f'<script type="module">{script}</script>' for script in scripts)
    text = _insert_after(text, r"<meta\s+charset=[^>]*>", head)
    return _insert_before_last(text, "</body>", tail) if "</body>" in text else text + tail


def _content_security_policy_meta(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a meta element that allows only the given scripts and styles and prohibits network requests."""
    sources = {"script-src": scripts, "style-src": styles}
    rules = "; ".join(
        " ".join([directive, *map(_csp_hash, texts)] if texts else [directive, "'none'"])
        for directive, texts in sources.items()
    )
    content = f"default-src 'none'; {rules}; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _insert_after(text: str, pattern: str, addition: str) -> str:
    match = re.search(pattern, text)
    return text[: match.end()] + addition + text[match.end() :] if match else addition + text


def _insert_before_last(text: str, mark: str, addition: str) -> str:
    index = text.rindex(mark)
    return text[:index] + addition + text[index:]
