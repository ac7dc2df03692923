"""Run the browser that measures pages, and the explorer's server."""

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
from qkv.serving.server import find_next_or_any_free_port

TIMEOUT_SECONDS = 60.0
"""Time in seconds after which a page counts as failed."""
SLOW_SECONDS = 5.0
"""Time in seconds to the first paint above which a page is opened only once."""
PageMetrics = dict[str, Any]


class _ManagedProcess:
    """A subprocess that is terminated at the end of the `with` block."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._responses = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


class Browser(_ManagedProcess):
    """A browser that is controlled through `explorer.mjs`, which documents the requests."""

    def __init__(self, *, times: int) -> None:
        node = shutil.which("node")
        if node is None or not (ROOT / "tests/page/node_modules").is_dir():
            raise MissingEngineError("the browser requires Node and its packages (make page-tools)")
        super().__init__([node, "benchmarks/explorer.mjs"])
        self._times = times

    def once(self, page: PageMetrics) -> PageMetrics:
        options = {"limit": 1000 * TIMEOUT_SECONDS, "hovers": 7, "rest": 400, **page}
        self._requests.write(json.dumps(options) + "\n")
        self._requests.flush()
        return json.loads(self._responses.readline())

    def best(self, page: PageMetrics) -> PageMetrics:
        """Open a page several times and return the fastest paint and the fastest hovers.

        Slow pages are opened only once.
        """
        metrics = [self.once(page)]
        while len(metrics) < self._times and metrics[-1].get("painted", inf) < 1000 * SLOW_SECONDS:
            metrics.append(self.once(page))
        hovers = [opened for opened in metrics if opened.get("hover")]
        fastest = min(metrics, key=lambda opened: opened.get("painted", inf))
        return (
            fastest
            | (min(hovers, key=lambda opened: median(opened["hover"])) if hovers else {})
            | {"painted": fastest.get("painted")}
        )


class Server(_ManagedProcess):
    """A server process that runs `qkv explore FOLDER`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", "from qkv.cli import main; main()", "explore", str(folder), "--no-browser"]
        super().__init__([*command, "--port", str(find_next_or_any_free_port(8600))])
        self.login_url = self._responses.readline().split()[-1]
        """URL of the page, including the access token."""
        self.address = self.login_url.partition("?")[0]
        self.model = str(folder)
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(self.login_url).close()

    def send_request(self, path: str, **body: Any) -> bytes:  # noqa: ANN401 - a request is any JSON
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.address + path, data, {"content-type": "application/json"})
        with self._opener.open(request) as response:
            return response.read()

    def page(self, state: dict[str, str], **more: Any) -> PageMetrics:  # noqa: ANN401 - see `explorer.mjs`
        return {"address": f"{self.address}#{urlencode({'model': self.model} | state)}", "enter": self.login_url} | more
