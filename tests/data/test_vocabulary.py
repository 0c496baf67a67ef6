"""A vocabulary numbers words in the order in which they first occur, and never renumbers one."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import vocabulary
from tritonrec.data.vocabulary import Vocabulary, hashed_ids, tensors_of, vocabularies_of

# Of xxHash's own tests, seed 0: lengths below 4, 8 and 32 bytes, and above.
PUBLISHED = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "abc": 0x44BC2CF5AD770999,
    "xxhash": 0x32DD38952C4BC720,
    "Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def some_words(rng: np.random.Generator, rows: int, distinct: int) -> list[str]:
    """Of 0 to 70 letters, two bytes some of them."""
    letters = np.array(list("abcdefgxyzä€"))
    words = ["".join(rng.choice(letters, rng.integers(0, 70))) + str(i) for i in range(distinct)]
    return [words[i] for i in rng.integers(0, distinct, rows)]


def test_ids_are_those_of_pandas_factorize() -> None:
    words = some_words(np.random.default_rng(3), 5000, 700)
    codes, known = pd.factorize(np.array(words, dtype=object))
    made = Vocabulary()
    np.testing.assert_array_equal(made.encode(words, extend=True), codes)
    assert made.words.to_pylist() == list(known)
    np.testing.assert_array_equal(made.encode(words), codes)
    assert made.decode(codes).to_pylist() == words


def test_the_next_day_renumbers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "ROWS", 37)  # the table and the store grow at many places
    words = some_words(np.random.default_rng(5), 3000, 900)
    whole, grown = Vocabulary(words), Vocabulary()
    for first in range(0, 3000, 250):
        day = words[first : first + 250]
        before = grown.words.to_pylist()
        assert grown.decode(grown.encode(day, extend=True)).to_pylist() == day
        assert grown.words.to_pylist()[: len(before)] == before
    assert grown == whole and len(grown) < 901


@given(st.lists(st.text(max_size=9)), st.lists(st.text(max_size=9)))
def test_any_text_is_a_word(first: list[str], second: list[str]) -> None:
    made = Vocabulary(first)
    ids = made.encode(second, extend=True)
    assert made.words.to_pylist() == list(dict.fromkeys(first + second))
    assert made.decode(ids).to_pylist() == second


def spellings(words: list[str]) -> dict[str, pa.Array | pa.ChunkedArray]:
    plain = pa.array(words)
    return {
        "string": plain,
        "large_string": pa.array(words, pa.large_string()),
        "string_view": pa.array(words, pa.string_view()),
        "dictionary": pa.array(["unused", *words]).dictionary_encode().slice(1),
        "sliced": pa.array(["before", *words, "after"]).slice(1, len(words)),
        "chunked": pa.chunked_array([words[:5], [], words[5:]]),
        "chunked dictionaries": pa.chunked_array(
            [pa.array(words[:7]).dictionary_encode(), pa.array(words[7:]).dictionary_encode()]
        ),
        "pandas": pd.Series(words),
        "numpy": np.array(words, dtype=object),
    }


@pytest.mark.parametrize("spelling", spellings(["a", "b"] * 5))
def test_one_column_has_one_meaning(spelling: str) -> None:
    words = some_words(np.random.default_rng(8), 40, 12)
    made = Vocabulary()
    ids = made.encode(spellings(words)[spelling], extend=True)
    np.testing.assert_array_equal(ids, pd.factorize(np.array(words, dtype=object))[0])
    assert made.words.to_pylist() == list(dict.fromkeys(words))
    np.testing.assert_array_equal(hashed_ids(spellings(words)[spelling]), hashed_ids(words))


def test_an_unknown_word_is_an_error_or_a_chosen_id() -> None:
    made = Vocabulary(["a", "b"])
    with pytest.raises(ValueError, match=r"1 of 3 words are not among the 2 .* 'c' in row 1"):
        made.encode(["a", "c", "b"])
    assert made.encode(["c", "b", "d"], unknown=-7).tolist() == [-7, 1, -7]
    assert len(made) == 2


def test_a_missing_word_and_other_types_are_errors_and_nothing_is_added() -> None:
    made = Vocabulary(["a"])
    with pytest.raises(ValueError, match="row 3 has no word"):
        made.encode(pa.chunked_array([["b", "c"], ["d", None]]), extend=True)
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["x", None]))
    with pytest.raises(ValueError, match="row 1 has no word"):
        made.encode(codes, extend=True)
    for wrong in (pa.array([1, 2]), pa.array([b"x"]), [1, 2], "word", pa.array([1]).dictionary_encode()):
        with pytest.raises(TypeError, match="words must be"):
            made.encode(wrong, extend=True)
    assert len(made) == 1


def test_a_growth_without_memory_adds_nothing_and_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made, zeros, more = Vocabulary(["a", "b"]), np.zeros, [str(number) for number in range(999)]

    def full(size, **of):
        if size > 128:
            raise MemoryError
        return zeros(size, **of)

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", full)
        with pytest.raises(MemoryError):
            made.encode(more, extend=True)
    assert made.encode(["b", "a"]).tolist() == [1, 0] and len(made) == 2
    assert made.encode(["b", *more, "a"], extend=True).tolist() == [1, *range(2, 1001), 0]


def test_only_ids_of_words_are_decoded() -> None:
    made = Vocabulary(["a", "b"])
    for wrong in ([0, 2], [-1]):
        with pytest.raises(ValueError, match=f"ids 0 to 1, got {wrong[-1]}"):
            made.decode(wrong)
    with pytest.raises(ValueError, match="is empty"):
        Vocabulary().decode([0])
    with pytest.raises(ValueError, match="integers of one dimension"):
        made.decode([0.5])
    assert made.decode([]).to_pylist() == [] == Vocabulary().words.to_pylist()


def test_a_copy_grows_by_itself() -> None:
    made = Vocabulary(["a", "b"])
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        twin.encode(["zz"], extend=True)
        assert made.encode(["zz"], unknown=-1).tolist() == [-1] and len(twin) == len(made) + 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["a", "bc", "d"], ""),
        (["a", "bc"], ""),
        (["a"], "id 1 is 'bc' there and is none here"),
        (["a", "bd", "e"], "id 1 is 'bc' there and is 'bd' here"),
        (["ab", "c"], "id 0 is 'a' there and is 'ab' here"),
    ],
)
def test_a_word_with_another_id_than_before_is_named(words: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        Vocabulary(words).check_extends(Vocabulary(["a", "bc"]))


def test_a_file_and_a_state_keep_it(tmp_path) -> None:
    words = some_words(np.random.default_rng(11), 500, 300)
    made = Vocabulary(words)
    made.save(tmp_path / "item.parquet")
    assert Vocabulary.load(tmp_path / "item.parquet") == made == Vocabulary.from_state(made.state_dict())
    assert pq.read_table(tmp_path / "item.parquet")["word"].to_pylist() == list(dict.fromkeys(words))
    taken = made.state_dict()
    kept = {name: tensor.clone() for name, tensor in taken.items()}
    made.encode([f"new {i}" for i in range(4000)], extend=True)
    assert all(torch.equal(taken[name], kept[name]) for name in kept), "a state is of the time it was taken"


def test_columns_of_any_name_have_their_vocabulary_back() -> None:
    made = {name: Vocabulary([name]) for name in ("item", "user/id", "a/b/", "")}
    assert vocabularies_of(tensors_of(made)) == made


@pytest.mark.parametrize(
    "state",
    [
        {"bytes": [97, 97], "offsets": [0, 1, 2]},  # "a" twice
        {"bytes": [97, 98], "offsets": [0, 1]},
        {"bytes": [97, 98], "offsets": [0, 2, 1, 2]},
        {"bytes": [97, 98], "offsets": [1, 2]},
        {"bytes": [], "offsets": []},
        {"bytes": [0xFF], "offsets": [0, 1]},  # no UTF-8
        {"bytes": [97]},
    ],
)
def test_a_damaged_state_is_an_error_and_changes_nothing(state: dict[str, list[int]]) -> None:
    dtypes = {"bytes": torch.uint8, "offsets": torch.int64}
    made = Vocabulary(["kept"])
    with pytest.raises(ValueError, match=r"vocabulary|repeats the word|UTF-?8"):
        made.load_state_dict({name: torch.tensor(each, dtype=dtypes[name]) for name, each in state.items()})
    assert made == Vocabulary(["kept"])


def test_another_file_is_no_vocabulary(tmp_path) -> None:
    path = tmp_path / "words.parquet"
    for table in ({"word": ["a", "a"]}, {"word": ["a", None]}, {"word": [1]}, {"item": ["a"]}):
        pq.write_table(pa.table(table), path)
        with pytest.raises(ValueError, match="is no vocabulary"):
            Vocabulary.load(path)
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match="is no vocabulary"):
        Vocabulary.load(path)


def test_hashes_are_the_published_ones() -> None:
    assert hashed_ids(list(PUBLISHED)).view(np.uint64).tolist() == list(PUBLISHED.values())
    high = [each >> 24 for each in PUBLISHED.values()]
    assert hashed_ids(list(PUBLISHED), bits=40).tolist() == high
    for bits in (0, 65):
        with pytest.raises(ValueError, match="bits must be"):
            hashed_ids(["a"], bits=bits)


def test_words_with_equal_tags_and_slots_stay_apart() -> None:
    """Half a million words: some share the 24 bits and the slot that a slot of the table compares."""
    words = pa.array([f"w{i}" for i in range(500_000)])
    made = Vocabulary(words)
    assert len(made) == 500_000
    np.testing.assert_array_equal(made.encode(words), np.arange(500_000))
