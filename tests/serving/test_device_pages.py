"""Promise: keys and values in a device's pages score as its full recomputation does, in every bit.

Triton's interpreter runs the kernels on the CPU; a GPU runs them itself where there is one. The emulator runs
`tests/emulator/test_cached_pages.py`.
"""

from dataclasses import replace

import pytest
import torch
from impls import GPU, TRITON
from test_cached import LONGEST, PAGE, PAGE_BYTES, SIZES, Served, exports_in

from tritonrec.nn import HSTU, FuXi, FuXiConfig, HSTUConfig, SASRec
from tritonrec.ops import use_impl
from tritonrec.serving import Predictor
from tritonrec.serving.cached import CachedPredictor, CacheMemoryError
from tritonrec.serving.cached.pages import Pages
from tritonrec.serving.device import DevicePredictor, on_device
from tritonrec.serving.spread_rows import SpreadRowsPredictor

DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return exports_in(tmp_path_factory)


class OnDevice:
    """`Exports` that are computed and cached on a device, with two pages there for all users."""

    def __init__(self, exports, host_pages=0, device=DEVICE):
        self.model, self.paths = exports.model, exports.paths
        self.full = [DevicePredictor(each, device) for each in exports.full]
        self.host_memory = host_pages * PAGE_BYTES

    def cached(self, memory, version=0):
        return CachedPredictor(self.full[version], self.model(), 2 * PAGE_BYTES, self.host_memory)


def life(exports):
    """Mixed batches, evictions, events that go on behind a page, a new version, a restart."""
    served = Served(exports)
    for user, count in enumerate([3, PAGE + 1, 1]):
        served.append(user, count)
    served.check([0, 2])
    served.check([1, 0])
    for user in range(3):
        served.append(user, 2)
    served.check([2, 0, 1, 0])
    evicted = served.cached.stats()
    served.edit(1, PAGE - 2)
    served.check([1])
    served.reload()
    served.check([0, 1])
    served.append(0, 1)
    served.restart()
    served.check([1, 2])
    return evicted, served.cached.stats()


@pytest.mark.if_changed
@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize(("timed", "kind"), [(True, HSTU), (False, SASRec)], ids=["hstu", "sasrec"])
@pytest.mark.parametrize("host_pages", [0, 3])
def test_a_life_in_a_devices_pages_has_the_bits_of_recomputation(made, impl, timed, kind, host_pages):
    exports = OnDevice(made(timed, kind=kind), host_pages, DEVICE if impl == "triton" else "cpu")
    with use_impl(impl):
        evicted, _ = life(exports)
    tokens = 3 + PAGE + 1 + 1 + 3 * (2 + timed)
    assert evicted.evicted >= 3 and (evicted.computed == tokens) == (host_pages > 0), evicted
    assert (evicted.host_pages_used > 0) == (host_pages > 0)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_device_that_is_the_cpu_has_the_bits_of_a_predictor(made, precision):
    """So what differs on a device is its arithmetic alone."""
    exports = made(True, precision)
    full, histories, times = exports.full[0], [[3, 7], [5] * LONGEST], [[1, 9], list(range(LONGEST))]
    device = DevicePredictor(full, "cpu")
    got, want = (each.scores(histories, timestamps=times) for each in (device, full))
    assert torch.equal(got, want)
    items = torch.tensor([5, -1, 5, 70])
    assert torch.equal(device.scores([3], items, [1]), full.scores([3], items, [1]))
    for k, exclude in ((4, "history"), (60, None), (1, [[1, 1, 2, 999], []])):
        got = device.retrieve(histories, k, times, exclude)
        want = full.retrieve(histories, k, times, exclude)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    none = torch.empty(0, dtype=torch.int64)
    ids, scores = device.best_without(torch.empty(0, 16), 3, none, torch.zeros(1, dtype=torch.int64))
    assert ids.shape == scores.shape == (0, 3)


def test_the_best_items_of_many_users_are_searched_in_groups(made, monkeypatch):
    """Equal scores too: of the same weights the smaller id comes first."""
    full = made(True).full[0]
    monkeypatch.setitem(
        full.tables, "item", replace(full.tables["item"], weights=full.tables["item"].weights.clone())
    )
    full.tables["item"].weights[10:30] = full.tables["item"].weights[10]
    monkeypatch.setattr("tritonrec.serving.device.SCORES", 2 * len(full.item_ids))
    histories = [[3, 7], [1], [2, 9], [5], [8, 8, 8]]
    times = [[0] * len(each) for each in histories]
    device = DevicePredictor(full, "cpu")
    for got, want in zip(*(each.retrieve(histories, 40, times) for each in (device, full)), strict=True):
        assert torch.equal(got, want)


def test_pages_behind_keep_what_a_device_has_no_room_for():
    """Longest unused first; a user who comes back takes what is there, although others come in between."""
    draw = torch.Generator().manual_seed(1)
    pages = Pages(2 * 2 * PAGE * 3 * 4, 2, 3, torch.float32, 2 * PAGE, behind=3 * 2 * PAGE * 3 * 4)
    values = {user: torch.randn(2, n, 3, generator=draw) for user, n in (("a", 70), ("b", 5), ("c", 9))}

    def fill(user):
        entry = pages.take(user, values[user].shape[1], ())
        if not entry.known:
            pages.store[:, pages.rows(entry, values[user].shape[1])] = values[user]
            entry.known, entry.vector = values[user].shape[1], values[user][0, 0]
            return False
        assert torch.equal(pages.store[:, pages.rows(entry, entry.known)], values[user])
        assert torch.equal(entry.vector, values[user][0, 0])
        return True

    assert [fill(user) for user in "abcab"] == [False, False, False, True, True]
    assert pages.used == 1 and pages.behind.used == 3  # b here; a and c there
    pages.find("c").known = 4  # its history was edited
    values["c"] = values["c"][:, :4]
    assert fill("c") and pages.find("a").known == 70
    pages.drop("a")
    assert pages.find("a") is None and pages.behind.used == 0
    for user in "abcabc":
        assert pages.take(user, 2 * PAGE, ()).known in (0, 5, 4)
        assert pages.used == 2 and pages.behind.used <= 3
    with pytest.raises(CacheMemoryError, match="one user of 128 events needs 2 pages"):
        Pages(2 * 2 * PAGE * 3 * 4, 2, 3, torch.float32, 2 * PAGE, behind=100)


def test_what_a_device_cannot_do_is_refused_by_name(made, monkeypatch):
    exports = made(True)
    full, layers = exports.full[0], exports.full[0].manifest["dense"]["layers"]
    with pytest.raises(ValueError, match="there is no device 'gpu'"):
        on_device(full, "gpu")
    with pytest.raises(ValueError, match="'meta' is not usable"):
        CachedPredictor.load(exports.paths[0], exports.model(), device="meta")
    assert on_device(full, "cpu") is full
    with pytest.raises(ValueError, match="host_memory is of the pages behind a device's"):
        CachedPredictor.load(exports.paths[0], exports.model(), host_memory="1MiB")

    def described(**changes):
        return Predictor(
            {**full.manifest, "dense": {**full.manifest["dense"], **changes}}, full.tables, full.program
        )

    for wrong, message in [
        ({"model": "HSTU", "config": layers["config"] | {"heads": 4, "qk_dim": 4, "v_dim": 6}}, "other bits"),
        ({"model": "HSTU", "config": layers["config"] | {"layers": 1}}, "layers.1.* missing in the model"),
        ({"model": "FuXi", "config": {}}, "describes no layers of its program"),
        ({"model": "HSTU", "config": {"sizes": 1}}, "describes no layers of its program"),
    ]:
        with pytest.raises(ValueError, match=message):
            DevicePredictor(described(layers=wrong), "cpu")
    dense = {name: each for name, each in full.manifest["dense"].items() if name != "layers"}
    with pytest.raises(ValueError, match="does not say which layers it has"):
        DevicePredictor(Predictor({**full.manifest, "dense": dense}, full.tables, full.program), "cpu")
    with pytest.raises(ValueError, match="needs a dense model of kind next_item"):
        DevicePredictor(described(kind="click"), "cpu")
    front = SpreadRowsPredictor(full, ranks=None, version=0)
    with pytest.raises(TypeError, match="a SpreadRowsPredictor computes in a way of its own"):
        DevicePredictor(front, "cpu")
    with pytest.raises(TypeError, match="FuXi has no cached inference"):
        CachedPredictor(DevicePredictor(full, "cpu"), FuXi(FuXiConfig(dim=16, max_seq_len=LONGEST)))
    with pytest.raises(ValueError, match="other bits than the export's program"):
        other = HSTU(HSTUConfig(relative_bias=True, **SIZES | {"heads": 4, "qk_dim": 4, "v_dim": 6}))
        CachedPredictor(DevicePredictor(full, "cpu"), other)
    items = full.tables["item"]
    monkeypatch.setitem(full.tables, "item", replace(items, weights=items.weights.clone()))
    full.tables["item"].weights[3] = torch.inf
    with pytest.raises(ValueError, match=r"the score of row 0 for item \d+ is (-?inf|nan)"):
        DevicePredictor(full, "cpu").retrieve([5], 2, [1])


def test_a_server_on_a_device_answers_both_ways_in_its_bits(made, monkeypatch):
    """Histories in the request and users' events, of a folder and of what follows it."""
    from tritonrec.serving.server.bodies import Retrieve
    from tritonrec.serving.server.model import Change
    from tritonrec.serving.server.model import Served as OfServer

    exports, devices = made(False), []
    monkeypatch.setattr(
        "tritonrec.serving.server.model.on_device",
        lambda predictor, device: devices.append(device) or DevicePredictor(predictor, "cpu"),
    )
    served = OfServer(lambda: exports.full[0], exports.model(), "1MiB", "1MiB", "cuda")
    for version in range(2):
        served.use(exports.full[version])
        assert isinstance(served.version.users.predictor, DevicePredictor)
        history = [3, 7, 12]
        assert not isinstance(served.answer([Change("ann", history, whole=True)])[0], Exception)
        items, scores = exports.full[version].retrieve(history, 4)
        for body in ({"histories": [history]}, {"users": ["ann"]}):
            (answer,) = served.answer([Retrieve(k=4, **body)])
            assert answer["items"] == items.tolist() and answer["scores"] == scores.tolist()
    assert devices == ["cuda"] * 3
