"""The site builds strictly: a missing page or a dead link would end it."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install 'qkv[docs]'")


@pytest.mark.long
def test_the_site_builds_strictly_and_has_every_made_page(tmp_path):
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "Aborted" not in made.stderr
    for page in ("commands", "results", "mission", "cards/stories", "notebooks/b-basics", "reference/nn"):
        assert (tmp_path / page / "index.html").stat().st_size > 5000, page
    loaded = (tmp_path / "index.html").read_text()
    assert "fonts.googleapis" not in loaded
