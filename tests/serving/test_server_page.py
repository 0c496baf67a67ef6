"""Promise: the page at / shows what the server answers, its errors, the model's step; it fits."""

import json
import re
from html import unescape
from importlib.resources import files

import pytest
from browser import BROWSER, measured, opened
from served_models import export_hstu, listening

from tritonrec.serving import Predictor
from tritonrec.serving.server import ServerConfig

PAGE = files("tritonrec.serving.server").joinpath("page.html").read_text("utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_hstu(tmp_path_factory.mktemp("page"))[0]


def shown(port, query=""):
    page = opened(f"http://127.0.0.1:{port}/{query}", "--virtual-time-budget=20000", "--dump-dom").stdout
    cells = re.findall(r"<td>(.*?)</td>", page)
    rows = [cells[at : at + 3] for at in range(0, len(cells), 3)]
    texts = {
        name: unescape(re.search(rf'id="{name}"[^>]*>(.*?)</p>', page)[1]) for name in ("model", "error")
    }
    return rows, texts["model"], texts["error"]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_it_fits(tmp_path, width):
    (tmp_path / "page.html").write_text(PAGE)
    found = measured(tmp_path, ["page.html"], width)["page.html"]
    assert found["scroll"] <= width and found["beyond"] == [] and found["words"] > 100


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_it_shows_items_and_errors(model):
    full = Predictor.load(model)
    items, scores = full.retrieve([3, 7], 4)
    with listening(model, ServerConfig(timeout=60.0)) as port:
        rows, step, error = shown(port, "?history=3,%207&k=4")
        assert [row[:2] for row in rows] == [
            [str(n + 1), str(item)] for n, item in enumerate(items[0].tolist())
        ]
        assert [float(row[2]) for row in rows] == pytest.approx(scores[0].tolist(), rel=1e-5)  # six digits
        assert (step, error) == ("Step 1", "")
        rows, _, error = shown(port, "?history=9223372036854775807&k=1")  # an id that JSON.parse would round
        assert len(rows) == 1 and error == ""
        rows, _, error = shown(port, "?history=a%20word&k=4")
        assert rows == [] and error.startswith("invalid: the history has words")


def test_it_needs_nothing_from_elsewhere_and_its_script_finds_its_elements():
    """Without a browser."""
    assert not re.search(r"(src|href)=\"(https?:)?//", PAGE) and "http" not in PAGE
    names = {*re.findall(r'\bat\("(\w+)"\)', PAGE), "history", "k"}
    assert names == {*re.findall(r'\bid="(\w+)"', PAGE)}


def test_ids_beyond_the_numbers_of_a_script_stay_exact():
    """The page's two expressions, which write ids and keep long ones of an answer as text."""
    pattern = re.search(r"text\.replace\(/(.*?)/g, '\"\$&\"'\)", PAGE)[1]
    answer = (
        '{"items":[[9223372036854775807,-9223372036854775808,5]],"scores":[[1.0349000692367554,2.5,-1.5]]}'
    )
    pattern = pattern.replace(r"(?<=[[,]\s*)", r"(?<=[\[,])").replace(r"(?=\s*[,\]])", r"(?=[,\]])")
    found = json.loads(re.sub(pattern, lambda match: f'"{match[0]}"', answer))
    assert found["items"] == [["9223372036854775807", "-9223372036854775808", 5]]
    assert found["scores"] == [[1.0349000692367554, 2.5, -1.5]]
