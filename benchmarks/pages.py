"""A browser that opens one page after the other and says how fast it was; and the server of our own pages."""

import json
import shutil
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Self
from urllib.parse import urlencode

from benchmarks.engine import ROOT, MissingEngineError
from qkv.serving.server import find_free_port

LIMIT = 60.0
"""Seconds after which a page counts as dead."""
LONG = 5.0
"""Seconds to paint beyond which a page is not opened again."""
Told = dict[str, Any]


class _Started:
    """A process of ours, ended with the block."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


class Browser(_Started):
    """`explorer.mjs` says what can be asked of a page."""

    def __init__(self, *, times: int) -> None:
        node = shutil.which("node")
        if node is None or not (ROOT / "tests/page/node_modules").is_dir():
            raise MissingEngineError("the browser needs Node and its packages: make page-tools")
        super().__init__([node, "benchmarks/explorer.mjs"])
        self._times = times

    def once(self, page: Told) -> Told:
        asked = {"limit": 1000 * LIMIT, "hovers": 7, "rest": 400, **page}
        self._questions.write(json.dumps(asked) + "\n")
        self._questions.flush()
        return json.loads(self._answers.readline())

    def best(self, page: Told) -> Told:
        """The quickest painting and the quickest hovers of so many times; what takes long is opened once."""
        told = [self.once(page)]
        while len(told) < self._times and told[-1].get("painted", inf) < 1000 * LONG:
            told.append(self.once(page))
        hovers = [one for one in told if one.get("hover")]
        quickest = min(told, key=lambda one: one.get("painted", inf))
        return (
            quickest
            | (min(hovers, key=lambda one: median(one["hover"])) if hovers else {})
            | {"painted": quickest.get("painted")}
        )


class Server(_Started):
    """`qkv explore FOLDER`, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", "from qkv.cli import main; main()", "explore", str(folder), "--no-browser"]
        super().__init__([*command, "--port", str(find_free_port(8600))])
        self.enter = self._answers.readline().split()[-1]
        """The address with the token."""
        self.address = self.enter.partition("?")[0]
        self.model = str(folder)
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(self.enter).close()

    def ask(self, path: str, **body: Any) -> bytes:  # noqa: ANN401 - a question is any JSON
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.address + path, data, {"content-type": "application/json"})
        with self._opener.open(request) as answer:
            return answer.read()

    def page(self, state: dict[str, str], **more: Any) -> Told:  # noqa: ANN401 - see `explorer.mjs`
        return {"address": f"{self.address}#{urlencode({'model': self.model} | state)}", "enter": self.enter} | more
