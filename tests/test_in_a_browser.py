"""Promise: report and site are read at 1280 and at 400 pixels without scrolling sideways: what is wider, such
as a table, scrolls by itself. `test_report.py` and `test_docs_site.py` need no browser.
"""

import os
import shutil
from pathlib import Path

import pytest
from browser import BROWSER, measured
from typer.testing import CliRunner

from tritonrec.harness.cli import app

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(os.environ.get("TRITONREC_SITE", ROOT / "out/site"))
"""What `make docs` built."""
WIDTHS = (1280, 400)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here"),
]


def check(found, width):
    for page, size in found.items():
        assert size["inner"] == width
        assert size["scroll"] <= width and size["beyond"] == [], f"{page}: {size}"
        assert size["pictures"] == [], f"{page}: {size['pictures']} are not shown"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report(tmp_path, width):
    words = ["report", "--folder", str(tmp_path), "--html", str(tmp_path / "report.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    found = measured(tmp_path, ["report.html"], width)
    check(found, width)
    assert found["report.html"]["words"] > 10_000


@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="no site: make docs")
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_of_the_site(tmp_path, width):
    site = tmp_path / "site"
    shutil.copytree(SITE, site)
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    found = measured(site, pages, width)
    assert len(found) > 30
    check(found, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_too_wide_is_noticed(tmp_path, width):
    """The check itself: a table beyond the edge, the same in a box that scrolls, a missing picture."""
    table = f'<table style="width: {width + 200}px"><tr><td>wide</td></tr></table>'
    pages = {
        "wide.html": table,
        "folded.html": f"<details><summary>more</summary>{table}</details>",
        "boxed.html": f'<div style="overflow-x: auto">{table}</div>',
        "picture.html": '<img src="nowhere.png">',
    }
    for name, body in pages.items():
        (tmp_path / name).write_text(f"<!doctype html><html><body>{body}</body></html>")
    found = measured(tmp_path, list(pages), width)
    wide = [size["scroll"] > width and len(size["beyond"]) > 0 for size in found.values()]
    assert wide == [True, True, False, False]
    assert [len(size["pictures"]) for size in found.values()] == [0, 0, 0, 1]
    check({"boxed.html": found["boxed.html"]}, width)
    for name in ("wide.html", "folded.html", "picture.html"):
        with pytest.raises(AssertionError, match=name):
            check({name: found[name]}, width)
