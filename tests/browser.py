"""Pages in a headless Chromium, in a frame of a given width: a window of its own has 500 pixels at least.

A page gets a script that opens what is folded, waits for pictures, and tells its size to the page around it.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HEIGHT = 900
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
MEASURE = """
<script>addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(each => each.open = true);
  const page = document.documentElement, beyond = [...document.body.querySelectorAll("*")].filter(each => {
    for (let outer = each; outer !== document.body; outer = outer.parentElement)
      if (["auto", "hidden", "clip", "scroll"].includes(getComputedStyle(outer).overflowX)) return false;
    return each.getBoundingClientRect().right > innerWidth + 1;
  });
  parent.postMessage({
    inner: innerWidth, scroll: page.scrollWidth, words: document.body.innerText.length,
    beyond: beyond.slice(0, 3).map(each => each.outerHTML.slice(0, 120)),
    pictures: [...document.images].filter(each => !each.naturalWidth).map(each => each.src.slice(0, 80)),
  }, "*");
}, 50));</script>
"""
AROUND = """<!doctype html><body style="margin: 0"><iframe width="WIDTH" height="HEIGHT" style="border: 0">
</iframe><script>
const pages = PAGES, found = [], frame = document.querySelector("iframe");
const next = () => found.length < pages.length
  ? frame.src = pages[found.length] : document.documentElement.dataset.found = JSON.stringify(found);
addEventListener("message", told => { found.push(told.data); next(); });
next();
</script>"""


def opened(page: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    """The browser's output and errors as it opens a page of ours, a file or a URL."""
    always = ["--headless", "--disable-gpu", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:  # as in a container, where it starts with this option of its own alone
        always.append("--no-sandbox")
    command = [BROWSER, *always, *options, page.as_uri() if isinstance(page, Path) else page]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def measured(folder: Path, pages: list[str], width: int, picture: Path | None = None) -> dict[str, dict]:
    """By page of `folder` its ``inner`` and ``scroll`` width in pixels, the number of its letters, elements
    ``beyond`` its right edge that nothing scrolls, and ``pictures`` that are not shown.

    Changes the pages, so give a copy. `picture`: a PNG of the last page.
    """
    for page in pages:
        text = POLICY.sub("", (folder / page).read_text())
        if MEASURE not in text:
            text += MEASURE
        (folder / page).write_text(text)
    around = folder / "around.html"
    values = {"WIDTH": str(width), "HEIGHT": str(HEIGHT), "PAGES": json.dumps(pages)}
    around.write_text(re.sub("|".join(values), lambda match: values[match[0]], AROUND))
    shot = [f"--screenshot={picture}"] if picture else ["--dump-dom"]
    size = f"--window-size={max(width, 500)},{HEIGHT + 100}"
    shown = opened(around, "--virtual-time-budget=60000", size, *shot)
    if picture:
        return {}
    told = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert told, shown.stdout[:2000] + shown.stderr[-2000:]
    return dict(zip(pages, json.loads(unescape(told[1])), strict=True))
