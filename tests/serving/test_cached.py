"""Promise: scores from cached keys and values equal recomputation in every bit, whatever came before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import examples
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig, ops
from tritonrec.data import Interactions, NextItemLoader, Vocabulary, load
from tritonrec.nn import (
    HSTU,
    FuXi,
    FuXiConfig,
    HSTUConfig,
    NextItemModel,
    PaddedNextItem,
    SASRec,
    SASRecConfig,
    SASRecLayer,
)
from tritonrec.pipeline import WindowConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving.cached import CachedPredictor, CacheMemoryError
from tritonrec.serving.cached.pages import PAGE, Pages
from tritonrec.serving.users import UserHistories
from tritonrec.settings import bytes_of

LONGEST = PAGE + 6
SIZES = {"dim": 16, "layers": 2, "heads": 2, "qk_dim": 8, "v_dim": 12, "max_seq_len": LONGEST}
PAGE_BYTES = 2 * PAGE * 2 * (8 + 12) * 4
TWO_PAGES, THREE_PAGES = 2, 3  # of memory: one user, or a user of more than a page and one of less
KINDS = [
    pytest.param((False, "float32"), id="plain", marks=pytest.mark.slow),
    pytest.param((True, "float32"), id="timed"),
    pytest.param((True, "bf16"), id="timed-bf16", marks=pytest.mark.slow),
    pytest.param((False, "float32", SASRec), id="sasrec"),
    pytest.param((False, "bf16", SASRec), id="sasrec-bf16", marks=pytest.mark.slow),
]


class Exports:
    """Two versions of a model, as exports and as predictors that compute everything."""

    def __init__(self, folder, timed, precision, kind):
        self.kind, self.timed = kind, timed
        self.config = SASRecConfig(**SIZES) if kind is SASRec else HSTUConfig(**SIZES, relative_bias=timed)
        torch.manual_seed(7)
        model = self.model()
        with torch.no_grad():  # as after a long training: weights of time and position that matter
            for each in model.parameters():
                each.mul_(1.5).add_(torch.randn(each.shape, dtype=torch.float32) * 0.1)
        loader = NextItemLoader(load("zipf:users=50,items=60,median_length=30,seed=3"), 16, LONGEST, 3, 0)
        window = WindowConfig(precision=precision)
        self.paths = [folder / "one", folder / "two"]
        with adam_trainer(model, [FeatureConfig("item", 16)], lr=0.02, config=window) as trainer:
            for step, path in enumerate(self.paths):
                trainer.step(loader.batch(step))
                trainer.save(folder / "run")
                export(folder / "run", path, model)
        self.full = [Predictor.load(path) for path in self.paths]

    def model(self):
        return self.kind(self.config)

    def load(self, path, unknown="initial"):
        """In place of `Predictor.load`, which takes a second."""
        return self.full[self.paths.index(path)]

    def cached(self, memory="4MiB", version=0):
        """`memory` in bytes, or a small number of pages."""
        if memory in (TWO_PAGES, THREE_PAGES):
            memory *= PAGE_BYTES // (1 if self.full[0].manifest["dense"]["precision"] == "float32" else 2)
        return CachedPredictor.load(self.paths[version], self.model(), memory=memory)


def exports_in(tmp_path_factory):
    """Each kind of `Exports` that is asked for, made once."""
    kinds = {}

    def of(timed, precision="float32", kind=HSTU):
        if (timed, precision, kind) not in kinds:
            kinds[timed, precision, kind] = Exports(
                tmp_path_factory.mktemp("exports"), timed, precision, kind
            )
        return kinds[timed, precision, kind]

    return of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return exports_in(tmp_path_factory)


class Served:
    """A cached predictor, and the whole history of every user beside it."""

    def __init__(self, exports, memory=THREE_PAGES):
        self.exports, self.memory, self.version = exports, memory, 0
        self.cached = exports.cached(memory)
        self.events: dict[int, list[tuple[int, int]]] = {}
        self.draw, self.now = np.random.default_rng(5), 0

    def append(self, user, count):
        gaps = self.draw.choice([0, 1, 30, 4000, 10**6], count)
        new = [
            (int(item), self.now + int(gap))
            for item, gap in zip(self.draw.integers(0, 90, count), gaps, strict=True)
        ]
        new.sort(key=lambda event: event[1])
        self.now = max([self.now, *(time for _, time in new)])
        self.cached.append(user, [item for item, _ in new], [time for _, time in new])
        self.events.setdefault(user, []).extend(new)

    def edit(self, user, at):
        """Another item and time in the middle, as of a late event."""
        events = self.events[user]
        if events:
            at %= len(events)
            events[at] = ((events[at][0] + 1) % 90, events[at][1] + int(self.draw.integers(0, 2)) * 77)
            self.now = max(self.now, events[at][1])  # an append before it is refused
        self.cached.replace(user, [item for item, _ in events], [time for _, time in events])

    def cut(self, user, left):
        self.events[user] = self.events[user][:left]
        events = self.events[user]
        self.cached.replace(user, [item for item, _ in events], [time for _, time in events])

    def restart(self):
        self.cached = self.exports.cached(self.memory, self.version)
        for user, events in self.events.items():
            self.cached.replace(user, [item for item, _ in events], [time for _, time in events])

    def reload(self):
        self.version = 1 - self.version
        self.cached.reload(self.exports.paths[self.version])

    def check(self, users, k=4):
        users = [user for user in users if self.events.get(user)]
        if not users:
            return
        full = self.exports.full[self.version]
        last = [self.events[user][-LONGEST:] for user in users]
        given = [[item for item, _ in each] for each in last], [[time for _, time in each] for each in last]
        want = full.scores(given[0], timestamps=given[1])
        got = self.cached.scores(users)
        assert torch.equal(got, want), (got != want).any(1)
        for got, want in zip(
            self.cached.retrieve(users, k), full.retrieve(given[0], k, timestamps=given[1]), strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [pytest.param(TWO_PAGES, marks=pytest.mark.slow), "1MiB"])
def test_events_one_by_one_past_the_longest_history(made, kind, memory):
    served = Served(made(*kind), memory)
    for turn in range(LONGEST + 5):
        served.append(0, 1)
        if turn % 2:
            served.append(1, 1)
        if turn % 7 == 0 or turn > LONGEST - 4:
            served.check([0, 1])
        elif turn % 3 == 0:
            served.check([0])
    stats = served.cached.stats()
    assert (stats.evicted > 0) == (memory != "1MiB")
    assert stats.reused > stats.computed or stats.evicted


OPERATIONS = st.one_of(
    st.tuples(
        st.just("append"), st.integers(0, 4), st.sampled_from([0, 1, 1, 2, 5, PAGE - 1, PAGE, LONGEST])
    ),
    st.tuples(st.just("check"), st.lists(st.integers(0, 4), max_size=7)),
    st.tuples(st.just("check"), st.lists(st.integers(0, 4), max_size=2)),
    st.tuples(st.just("edit"), st.integers(0, 4), st.integers(0, 200)),
    st.tuples(st.just("cut"), st.integers(0, 4), st.integers(0, 200)),
    st.tuples(st.just("reload")),
    st.tuples(st.just("restart")),
)


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8))
@given(operations=st.lists(OPERATIONS, min_size=4, max_size=14))
def test_any_sequence_of_calls_gives_the_bits_of_recomputation(made, kind, operations):
    exports = made(*kind)
    with patch.object(Predictor, "load", exports.load):
        served = Served(exports)
        for name, *arguments in operations:
            if name in ("edit", "cut") and arguments[0] not in served.events:
                continue
            getattr(served, name)(*arguments)
        served.check([4, 3, 2, 1, 0, 4])
        served.check([0, 1])
        assert served.cached.stats().pages_used <= served.cached.stats().pages


@pytest.mark.parametrize("kind", KINDS)
def test_any_mix_and_size_of_batch(made, kind):
    served = Served(made(*kind), "1MiB")
    for user, count in enumerate([1, 2, 3, 4, 5, 63, 64, 65, 69, 70, 70]):
        served.append(user, count)
    everybody = list(served.events)
    served.check(everybody[:3])
    for user in everybody[::2]:
        served.append(user, 3)
    served.check(everybody[::-1])
    served.check([7, 7, 2, 7])
    for user in everybody:
        served.check([user])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_another_version_is_never_used(made, kind):
    exports = made(*kind)
    served = Served(exports, "1MiB")
    served.append(0, 40)
    served.check([0])
    computed, version = served.cached.stats().computed, served.cached.version
    served.reload()
    assert served.cached.version != version and served.cached.stats().cached == 0
    served.check([0])
    assert served.cached.stats().computed == computed + 40


@pytest.mark.if_changed
def test_only_new_events_are_computed_and_only_the_last_one_again_with_times(made):
    for timed in (False, True):
        served = Served(made(timed), "1MiB")
        served.append(0, 50)
        served.check([0])
        served.append(0, 2)
        served.check([0])
        served.check([0, 0])
        assert served.cached.stats().computed == 52 + timed


def test_a_time_known_late_is_seen(made):
    """The token before a new event asked at its own time, and asks at the event's now, in every layer."""
    exports = made(True)
    cached = exports.cached()
    cached.append("u", [1, 2, 3], [10, 20, 30])
    cached.encode(["u"])
    cached.append("u", [4], [30 + 2**20])
    want = exports.full[0].scores([[1, 2, 3, 4]], timestamps=[[10, 20, 30, 30 + 2**20]])
    assert torch.equal(cached.scores(["u"]), want)
    cached.replace("u", [1, 2, 3, 4], [10, 20, 30, 31])
    want = exports.full[0].scores([[1, 2, 3, 4]], timestamps=[[10, 20, 30, 31]])
    assert torch.equal(cached.scores(["u"]), want)


def test_a_replaced_history_keeps_what_it_shares(made):
    cached, full = made(False).cached(), made(False).full[0]
    cached.append("u", list(range(50)))
    cached.encode(["u"])
    changed = [*range(45), 7, 8, 9]
    cached.replace("u", changed)
    assert torch.equal(cached.scores(["u"]), full.scores(changed))
    assert cached.stats().computed == 50 + 3 and cached.stats().restarted == 0
    cached.replace("u", changed[1:])
    assert torch.equal(cached.scores(["u"]), full.scores(changed[1:]))
    assert cached.stats().restarted == 1


def test_candidates_are_scored_in_groups(made):
    exports = made(False)
    cached, ids = exports.cached(), torch.tensor([5, 17, 3, 9999, 5, -1], dtype=torch.int64)
    cached.append("u", [1, 2, 3])
    want = exports.full[0].scores([1, 2, 3], ids)
    for size in (1, 2, 6):
        got = torch.cat([cached.scores(["u"], part) for part in ids.split(size)], 1)
        assert torch.equal(got, want)
    assert cached.stats().computed == 3
    assert torch.equal(
        cached.retrieve(["u"], 3, exclude=None)[1], exports.full[0].retrieve([1, 2, 3], 3, exclude=None)[1]
    )


def test_threads_share_one_cache(made):
    exports = made(False)
    cached = exports.cached(THREE_PAGES)
    histories = {user: [user, *range(20 * user)][:LONGEST] for user in range(6)}
    for user, items in histories.items():
        cached.append(user, items)
    want = {user: exports.full[0].scores(items) for user, items in histories.items()}
    with ThreadPoolExecutor(4) as pool:
        for user, got in zip(
            [*histories] * 4, pool.map(lambda each: cached.scores([each]), [*histories] * 4), strict=True
        ):
            assert torch.equal(got, want[user])


def test_what_fails_changes_nothing(made):
    exports = made(True)
    cached = exports.cached()
    cached.append("u", [1, 2], [10, 20])
    want = cached.scores(["u"])
    for items, times, message in [
        ([3], None, "give timestamps"),
        ([3, 4], [30], r"timestamps must be \(2,\) int64"),
        ([3, 4], [40, 30], "an event of user 'u' at 30 is before one at 40"),
        ([3], [19], "an event of user 'u' at 19 is before one at 20"),
        ([3.5], [30], "ids of the history must be int64"),
        (["a"], [30], "no vocabulary"),
        (3, [30], "give a list"),
        ([3], ["x"], "timestamps must be integers"),
    ]:
        with pytest.raises(ValueError, match=message):
            cached.append("u", items, times)
        assert [each.tolist() for each in cached.history("u")] == [[1, 2], [10, 20]]
        assert torch.equal(cached.scores(["u"]), want)
    with pytest.raises(ValueError, match="no export"):
        cached.reload(exports.paths[0].parent / "run")
    assert torch.equal(cached.scores(["u"]), want)


def test_a_call_that_ends_in_an_error_leaves_the_cache_exact(made):
    served = Served(made(True), THREE_PAGES)
    served.append(0, 30)
    served.check([0])
    served.append(0, 3)
    cached = served.cached
    encoder = cached._encoder

    def failing(rows, step, store):
        encoder(2 * rows, step, store)  # leaves other keys and values
        raise MemoryError

    cached._encoder = failing
    with pytest.raises(MemoryError):
        cached.scores([0])
    cached._encoder = encoder
    served.append(0, 1)
    served.check([0])


def test_users_are_named_and_listed(made):
    cached = made(False).cached()
    cached.append("u", [])
    cached.append(3, [1])
    assert cached.encode([]).shape == (0, 16) and cached.encode(torch.tensor([3, 3])).shape == (2, 16)
    with pytest.raises(ValueError, match="the history of user 'u' has 0 items"):
        cached.scores([3, "u"])
    with pytest.raises(KeyError, match="user 'v' has no history here"):
        cached.scores(["v"])
    with pytest.raises(ValueError, match=r"users must be a list, got str: \[user\] is one"):
        cached.scores("u")
    with pytest.raises(ValueError, match="a user is named by a number or a text, got list"):
        cached.append(["u"], [1])
    cached.forget(3)
    cached.forget("nobody")
    with pytest.raises(KeyError, match="user 3 has no history"):
        cached.retrieve([3], 2)


def test_memory_for_less_than_one_user_is_refused(made):
    exports = made(False)
    with pytest.raises(
        CacheMemoryError, match=rf"{LONGEST} events needs 2 pages of {PAGE_BYTES:,} bytes, .*less"
    ):
        exports.cached(2 * PAGE_BYTES - 1)
    stats = exports.cached(2 * PAGE_BYTES).stats()
    assert (stats.pages, stats.page_bytes, stats.pages_used) == (2, PAGE_BYTES, 0)


def test_memory_is_bounded_and_counted(made):
    served = Served(made(False), THREE_PAGES)
    for user in range(9):
        served.append(user, 1 + 9 * user)
    served.check(list(range(9)))
    stats = served.cached.stats()
    assert stats.pages_used <= stats.pages == 3 and stats.users == 9 and stats.cached <= 3
    assert stats.history_bytes == 16 * sum(min(len(each), LONGEST) for each in served.events.values())


def test_users_of_a_batch_keep_their_pages(made):
    """User 0 was used first of three, and the memory has three pages."""
    served = Served(made(False), THREE_PAGES)
    for user in range(4):
        served.append(user, 5)
    served.check([0, 1, 2])
    before = served.cached.stats().computed
    served.check([3, 0])
    assert served.cached.stats().computed == before + 5 and served.cached.stats().evicted == 1
    served.reload()
    served.append(0, PAGE)
    served.check([0])
    served.cut(0, 5)  # and keeps two pages
    served.check([0, 1, 2])
    served.check([1])
    assert served.cached.stats().evicted == 2


def test_sizes_of_memory():
    assert [bytes_of(each) for each in (7, "7", "2KiB", "3 MiB", "1GiB")] == [7, 7, 2048, 3 << 20, 1 << 30]
    for wrong in (-1, True, "2GB", "", "x", 1.5, None):
        with pytest.raises(ValueError, match="memory must be bytes"):
            bytes_of(wrong)


def test_pages_go_to_one_user_and_the_least_recently_used_loses_them():
    pages = Pages(4 * 2 * PAGE * 3 * 4, 2, 3, torch.float32, 4 * PAGE)
    first, second = pages.take("a", PAGE, ()), pages.take("b", 2 * PAGE + 1, ())
    assert sorted(first.pages + second.pages) == [0, 1, 2, 3]
    assert pages.rows(second, PAGE + 2).tolist() == [
        *(second.pages[0] * PAGE + at for at in range(PAGE)),
        *(second.pages[1] * PAGE + at for at in range(2)),
    ]
    pages.take("a", PAGE, ())
    third = pages.take("c", 1, ())
    assert pages.find("b") is None and pages.find("a") is first and pages.evicted == 1
    assert not {*first.pages} & {*third.pages} and pages.used == 2
    pages.take("a", PAGE, ())
    pages.take("d", 3 * PAGE, {"c"})
    assert pages.find("a") is None and pages.find("c") is third and pages.used == 4


def test_other_models_are_refused_by_name(made, tmp_path):
    exports = made(False)
    fuxi = FuXi(FuXiConfig(dim=16, max_seq_len=LONGEST))
    with pytest.raises(TypeError, match=r"FuXi has no cached inference"):
        CachedPredictor.load(exports.paths[0], fuxi)
    padded = PaddedNextItem(torch.nn.Identity(), LONGEST)
    with pytest.raises(TypeError, match=r"PaddedNextItem has no cached inference.*BERT4Rec"):
        CachedPredictor.load(exports.paths[0], padded)
    for changes, message in [
        ({"max_seq_len": 9}, f"the export takes {LONGEST} events, the model 9"),
        ({"layers": 1}, "layers.1.* in the export and missing in the model"),
        ({"v_dim": 8}, r"layers.0.* is \(.*\) in the export and \(.*\) in the model"),
        ({"heads": 4, "qk_dim": 4, "v_dim": 6}, "other bits than the export's program"),
    ]:
        with pytest.raises(ValueError, match=message):
            CachedPredictor.load(exports.paths[0], HSTU(HSTUConfig(**SIZES | changes)))


class SeesAll(SASRecLayer):
    """Its tokens see later ones, which its ``over`` does not say."""

    def forward(self, x, tokens, seed):
        q, k, v = self._projected(x)
        bounds = tokens.seq_offsets, self.config.max_seq_len
        x = x + self.output(ops.softmax_attention(q, k, v, *bounds).flatten(1))
        return x + self._fed(x)


class Bidirectional(NextItemModel):
    layer = SeesAll


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path):
    """Of two layers: keys and values of the first one are those of a token by itself."""
    config = SASRecConfig(**SIZES | {"max_seq_len": 6, "dim": 8})
    words = {"user": Vocabulary(), "item": Vocabulary()}
    path, _ = day(tmp_path, words, 6, Bidirectional, config)
    with pytest.raises(ValueError, match=r"Bidirectional has other bits than the export's.*see later ones"):
        CachedPredictor.load(path, Bidirectional(config))


def test_a_value_that_is_not_finite_is_refused(made):
    cached = made(False).cached()
    cached.append("u", [1, 2])
    cached.predictor.tables["item"].weights[:] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        cached.scores(["u"])


def test_histories_that_another_export_cannot_go_on_with(made, tmp_path):
    cached = made(False).cached()
    cached.append("u", [1, 2])
    with pytest.raises(
        ValueError, match="the export goes by times, and user 'u' has events without timestamps"
    ):
        cached.reload(made(True).paths[0], made(True).model())
    want = made(False).full[0].scores([1, 2])
    assert torch.equal(cached.scores(["u"]), want)
    cached.forget("u")
    cached.append("w", [1])
    cached.append("w", [2], [6])  # the first event has no time still
    with pytest.raises(ValueError, match="user 'w' has events without timestamps"):
        cached.reload(made(True).paths[0], made(True).model())
    cached.forget("w")
    cached.append("v", [1, 2], [5, 6])
    cached.reload(made(True).paths[0], made(True).model())
    assert torch.equal(cached.scores(["v"]), made(True).full[0].scores([1, 2], timestamps=[5, 6]))


def day(folder, words, longest, model_of=HSTU, config=None):
    """An export whose items are words."""
    rng = np.random.default_rng(longest)
    users = words["user"].encode([f"u{n}" for n in rng.integers(9, size=90)], extend=True)
    items = words["item"].encode([f"B{n}" for n in rng.integers(30, size=90)], extend=True)
    config = config or HSTUConfig(dim=8, layers=1, heads=1, qk_dim=8, v_dim=8, max_seq_len=longest)
    loader = NextItemLoader(Interactions(users, items, np.arange(90)), 8, longest, 3, 0)
    torch.manual_seed(1)
    model = model_of(config)
    with adam_trainer(model, [FeatureConfig("item", 8)], lr=0.02) as trainer:
        trainer.vocabularies = words
        trainer.step(loader.batch(0))
        trainer.save(folder / "run")
    export(folder / "run", folder / "out", model)
    return folder / "out", model


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=4))
def test_a_history_remembers_that_it_was_cut_and_what_came_without_times(parts):
    """However its events came; a version that takes more, or goes by times, must not go on with it."""
    needs = {"max_seq_len": 4, "timestamps": False}
    histories = UserHistories(SimpleNamespace(dense_of=lambda *_: needs, vocabularies={}))
    for number, (count, timed) in enumerate(parts):
        histories.append("u", list(range(count)), [number] * count if timed else None)
    own, counts = histories._histories["u"], [count for count, _ in parts]
    assert len(own.ids) == min(sum(counts), 4) and own.cut == (sum(counts) > 4)
    assert own.timed == all(timed for _, timed in parts)


@pytest.mark.if_changed
def test_words_and_exports_that_take_more(tmp_path):
    path, model = day(tmp_path / "a", {"user": Vocabulary(), "item": Vocabulary()}, 4)
    longer, long = day(tmp_path / "b", {"user": Vocabulary(), "item": Vocabulary(["B7"])}, 6)
    full, cached = Predictor.load(path), CachedPredictor.load(path, model)
    cached.append("u", ["B3", "B4"])
    cached.append("v", [0, 1])
    got, want = cached.retrieve(["u"], 3), full.retrieve(["B3", "B4"], 3)
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match="which is not among"):
        cached.append("u", ["nothing"])
    with pytest.raises(ValueError, match="other ids"):
        cached.reload(longer, long)
    cached.append("u", ["B3", "B5", "B6"])
    assert torch.equal(cached.scores(["u"]), full.scores(["B4", "B3", "B5", "B6"]))
    words = {"user": Vocabulary(), "item": full.vocabularies["item"]}
    longer, long = day(tmp_path / "c", words, 6)
    with pytest.raises(
        ValueError, match="the history of user 'u' was cut to 4 events, and the export takes 6"
    ):
        cached.reload(longer, long)
    assert torch.equal(cached.scores(["u"]), full.scores(["B4", "B3", "B5", "B6"]))
    cached.replace("u", ["B3", "B5"])
    cached.reload(longer, long)
    assert torch.equal(cached.scores(["u"]), Predictor.load(longer).scores(["B3", "B5"]))
