"""The documentation site builds in strict mode, in which a missing page or a broken link is an error."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="building the site requires mkdocs: pip install 'qkv[docs]'")


@pytest.mark.long
def test_the_site_builds_in_strict_mode_and_contains_all_generated_pages(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "Aborted" not in result.stderr
    for page in ("commands", "results", "mission", "cards/stories", "notebooks/b-basics", "reference/nn"):
        assert (tmp_path / page / "index.html").stat().st_size > 5000, page
    # The site must not load fonts from other servers.
    assert "fonts.googleapis" not in (tmp_path / "index.html").read_text()
