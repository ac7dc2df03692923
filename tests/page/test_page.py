"""The page in a real browser, and the built page against its source."""

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
MOST_SCRIPT = 200_000
NODE = shutil.which("node")


def need(folder: Path) -> None:
    if NODE is None:
        pytest.skip("there is no node here: the page is not rebuilt and not opened in a browser")
    if not (folder / "node_modules").is_dir():
        pytest.skip(f"the packages of {folder.relative_to(ROOT)} are not installed: make page-tools")


def test_the_script_is_small_and_loads_nothing_from_elsewhere():
    assert sorted(path.name for path in PAGE.iterdir()) == ["index.html", "page.css", "page.js"]
    assert (PAGE / "page.js").stat().st_size <= MOST_SCRIPT
    loads = re.compile(r"""(?:src|href|url|import|fetch|@import)\s*[=(]?\s*["'(]\s*(?:https?:)?//""")
    for path in PAGE.iterdir():
        assert not loads.findall(path.read_text())
    # What is left are names, not addresses: namespaces, and the manual named in Svelte's errors.
    known = ("http://www.w3.org/", "https://svelte.dev/e/")
    found = re.findall(r"https?://[^\"'` )]*", "".join(path.read_text() for path in PAGE.iterdir()))
    assert [address for address in found if not address.startswith(known)] == []


def test_the_page_rebuilt_is_the_one_in_the_package(tmp_path):
    need(ROOT / "explorer")
    made = subprocess.run(
        ["node", "node_modules/vite/bin/vite.js", "build"], cwd=ROOT / "explorer", capture_output=True, text=True,
        env={**os.environ, "QKV_PAGE": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for path in PAGE.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"{path.name} is not what make page builds"


def test_the_page_in_a_browser(tmp_path):
    need(HERE)
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
        pytest.skip(f"no browser starts here: {done.stderr.strip().splitlines()[0]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    written = "".join((HERE / name).read_text() for name in ("checks.mjs", "rare_checks.mjs"))
    assert len(found) == written.count("await check(") + 3 + 4  # one of them for four models, one for five maps
    assert [f"{one['name']}: {one['why']}" for one in found if not one["ok"]] == []
