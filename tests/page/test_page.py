"""The page in a real browser, and the built page compared with its source."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "src/qkv/serving/page"
MAX_SCRIPT_BYTES = 200_000
NODE = shutil.which("node")


def skip_unless_installed(folder: Path) -> None:
    if NODE is None:
        pytest.skip("Node is not installed")
    if not (folder / "node_modules").is_dir():
        pytest.skip(f"the packages of {folder.relative_to(ROOT)} are not installed: run make page-tools")


def test_the_script_is_small_and_loads_nothing_from_other_hosts():
    assert sorted(path.name for path in PAGE.iterdir()) == ["index.html", "page.css", "page.js"]
    assert (PAGE / "page.js").stat().st_size <= MAX_SCRIPT_BYTES
    loads = re.compile(r"""(?:src|href|url|import|fetch|@import)\s*[=(]?\s*["'(]\s*(?:https?:)?//""")
    for path in PAGE.iterdir():
        assert not loads.findall(path.read_text())
    # The remaining URLs are not loaded: XML namespaces, and the documentation linked in Svelte's errors.
    allowed = ("http://www.w3.org/", "https://svelte.dev/e/")
    urls = re.findall(r"https?://[^\"'` )]*", "".join(path.read_text() for path in PAGE.iterdir()))
    assert [address for address in urls if not address.startswith(allowed)] == []


def test_the_committed_page_is_up_to_date(tmp_path):
    skip_unless_installed(ROOT / "explorer")
    build = subprocess.run(
        ["node", "node_modules/vite/bin/vite.js", "build"], cwd=ROOT / "explorer", capture_output=True, text=True,
        env={**os.environ, "QKV_PAGE": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    for path in PAGE.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), (
            f"{path.name} differs from the output of make page"
        )


def test_the_page_in_a_browser(tmp_path):
    skip_unless_installed(HERE)
    command = [sys.executable, "-m", "tests.page.served", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            done = subprocess.run(
                ["node", "checks.mjs", address, str(tmp_path)], cwd=HERE, capture_output=True, text=True, check=False
            )
        finally:
            server.terminate()
    if "Failed to launch" in done.stderr or "error while loading shared libraries" in done.stderr:
        pytest.skip(f"no browser can be started: {done.stderr.strip().splitlines()[0]}")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    source = "".join((HERE / name).read_text() for name in ("checks.mjs", "rare_checks.mjs"))
    assert len(results) == source.count("await check(") + 3 + 4  # one check runs for four models, and one for five maps
    assert [f"{check['name']}: {check['reason']}" for check in results if not check["ok"]] == []
