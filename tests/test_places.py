"""Promise: a path may be a URL: what is written there is read again, and no folder ``s3:`` is made."""

import json
import os
import socket
import threading
import warnings
from pathlib import Path

import fsspec
import pytest
import torch

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointError, CheckpointStream, Saver
from tritonrec.data import Vocabulary
from tritonrec.data import load as load_log
from tritonrec.data.convert import new_folder
from tritonrec.data.log_files import filesystem_of
from tritonrec.files import atomic_write, check_writable, places, save_json
from tritonrec.files.places import (
    GrowingText,
    RemotePath,
    check_credentials,
    local_path,
    place_of,
    read_document,
    with_limit,
)
from tritonrec.loggers import CSVLogger, JSONLinesLogger
from tritonrec.serving import Predictor, export
from tritonrec.serving.exporter import published
from tritonrec.trace import Recorder, read, save_joined

pytestmark = pytest.mark.filterwarnings("ignore:.*its file system has no locks.*:RuntimeWarning")


@pytest.fixture(scope="module")
def s3():
    """The URL of a bucket of a local S3 server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, monkeypatch, tmp_path):
    """The URL of an empty folder; no test may write into the folder it is run in."""
    monkeypatch.chdir(tmp_path)
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://runs"
    yield f"{root}/{request.node.name.replace('[', '-').strip(']')}"
    assert os.listdir(tmp_path) == []


def table(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return {
        "keys": torch.randint(-(2**63), 2**63 - 1, (count,), generator=draw),
        "rows": torch.randn(count, 3, generator=draw),
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def by_key(columns):
    order = columns["keys"].argsort()
    return {name: values[order] for name, values in columns.items()}


def test_checkpoints_at_a_url_are_saved_changed_pruned_and_loaded(url):
    rows, dense = table(40, 1), {"w": torch.randn(3, 2)}
    with Saver(url, full_every=3) as saver:
        for step in range(1, 5):
            if saver.next_is_full():
                saver.save(step, dense, {"item": rows}, {"at": step})
            else:
                none = torch.empty(0, dtype=torch.int64)
                saver.save(step, dense, {"item": table(2, step)}, {"at": step}, erased={"item": none})
            saver.wait()
    assert checkpoint.steps(url) == [3, 4]
    loaded = checkpoint.load(url)
    assert loaded.step == 4 and loaded.meta == {"at": 4} and same(loaded.dense, dense)
    assert same(loaded.tables["item"], by_key(rows))
    old = by_key({name: torch.cat([rows[name], *(table(2, s)[name] for s in (2, 3))]) for name in rows})
    assert same(checkpoint.load(url, 3).tables["item"], old)
    stream = torch.cat([each["keys"] for each in CheckpointStream(url).rows("item", 4)])
    assert torch.equal(stream.sort().values, rows["keys"].sort().values)
    shards = [checkpoint.load(url, rank=rank, world_size=2).tables["item"] for rank in range(2)]
    assert sum(len(each["keys"]) for each in shards) == 40
    names = place_of(url).names()
    assert {name for name in names if name.startswith("step-")} >= {"step-000000000004.json"}
    assert not [name for name in names if name.startswith(".partial")]


def test_a_save_that_ends_before_its_manifest_is_no_checkpoint(url, monkeypatch):
    checkpoint.save(url, 1, {}, {"item": table(5, 1)}, {})
    upload = RemotePath.upload

    def broken(self, local):
        if self.name.endswith(".json"):
            raise OSError(5, "the connection is gone", str(self))
        upload(self, local)

    monkeypatch.setattr(RemotePath, "upload", broken)
    with pytest.raises(CheckpointError, match="the connection is gone"):
        checkpoint.save(url, 2, {}, {"item": table(5, 2)}, {})
    monkeypatch.undo()
    assert checkpoint.steps(url) == [1]
    assert same(checkpoint.load(url).tables["item"], by_key(table(5, 1)))


def test_a_damaged_object_is_named_by_its_url(url):
    checkpoint.save(url, 1, {}, {"item": table(5, 1)}, {})
    (name,) = [each for each in (place_of(url) / "step-000000000001").names() if each.startswith("item")]
    part = place_of(url) / "step-000000000001" / name
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{url}/step-000000000001/item.*was altered"):
        checkpoint.load(url)
    part.unlink()
    with pytest.raises(CheckpointError, match="is missing, but the manifest names it"):
        checkpoint.load(url)


def test_nothing_there_is_no_checkpoint(url):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.load(url)


def test_an_export_at_a_url_is_loaded_again(url):
    described = {
        "tables": {"item": {"dim": 2, "seed": 1, "table_id": 0, "scale": 0.5}},
        "features": {"item": {"table": "item", "pooling": "none"}},
    }
    rows = table(9, 3)
    checkpoint.save(f"{url}/saved", 1, {}, {"item": rows}, {"embedding": described})
    export(f"{url}/saved", f"{url}/out", shard_rows=5)
    predictor = Predictor.load(f"{url}/out")
    assert torch.equal(predictor.tables["item"].ids, rows["keys"].sort().values)
    assert torch.equal(predictor.tables["item"].weights, by_key(rows)["rows"][:, :2])
    with pytest.raises(ValueError, match="exists: export to a new folder"):
        export(f"{url}/saved", f"{url}/out")
    file = place_of(url) / "out" / "item.00000.parquet"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"item\.00000\.parquet was altered"):
        Predictor.load(f"{url}/out")


def test_traces_documents_and_logs(url):
    recorder = Recorder(0, 1)
    with recorder.span("compute", "compute", batch=0):
        pass
    recorder.save(f"{url}/part.pftrace")
    save_joined([f"{url}/part.pftrace"], f"{url}/all.pftrace")
    assert [span.name for span in read(f"{url}/all.pftrace").spans] == ["compute"]
    save_json({"a": 1}, f"{url}/report.json")
    assert json.loads(read_document(f"{url}/report.json")) == {"a": 1}
    with pytest.raises(KeyError), atomic_write(f"{url}/report.json") as part:
        part.write_text("{")
        raise KeyError
    assert json.loads(read_document(f"{url}/report.json")) == {"a": 1}
    check_writable(f"{url}/x")
    for kind, name in ((CSVLogger, "log.csv"), (JSONLinesLogger, "log.jsonl")):
        log = kind(f"{url}/{name}")
        log.log(1, {"loss": 2.0})
        log.log(2, {"loss": 1.0, "more": 3.0})
        log.close()
        with pytest.raises(FileExistsError):
            kind(f"{url}/{name}")
        log = kind(f"{url}/{name}", purge_step=2)
        log.log(2, {"loss": 0.5})
        log.close()
    assert (place_of(url) / "log.csv").read_text() == "step,loss,more\n1,2.0,\n2,0.5,\n"
    lines = (place_of(url) / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.0, 0.5]


def test_a_log_is_uploaded_now_and_then(monkeypatch):
    at = [100.0]
    monkeypatch.setattr("tritonrec.files.places.time.monotonic", lambda: at[0])
    place = place_of("memory://logs/grows.txt")
    log = GrowingText(place, "a\n")
    for moment, text, there in ((110, "b\n", "a\n"), (131, "c\n", "a\nb\nc\n"), (140, "d\n", "a\nb\nc\n")):
        at[0] = moment
        print(text, end="", file=log, flush=True)
        assert place.read_text() == there
    log.close()
    assert place.read_text() == "a\nb\nc\nd\n"


def test_a_store_without_locks_is_warned_of(recwarn):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save("memory://locks", 1, {}, {}, {})
    assert "nothing keeps a second run from saving there" in str(caught[0].message)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        (Path("s3://bucket/a"), "s3://bucket/a"),  # in which pathlib leaves one slash
        ("S3:/bucket/a/", "s3://bucket/a"),
        (Path("memory://x") / "y", "memory://x/y"),
        ("file:///tmp/x", "/tmp/x"),
        (Path("file:///tmp/x"), "/tmp/x"),
        ("a:b", "a:b"),
        ("./s3:x", str(Path("s3:x").absolute())),
        ("./s3:/b/x", str(Path("s3:/b/x").absolute())),
        ("file://localhost/tmp/x", "/tmp/x"),
        (Path("file://localhost/tmp/x"), "/tmp/x"),
        ("FILE:///tmp/a%20b", "/tmp/a b"),
        ("C:/x", "C:/x"),
    ],
)
def test_which_paths_are_urls(given, want, monkeypatch):
    monkeypatch.setattr("tritonrec.files.places._filesystem_of", lambda url: (None, url))
    assert str(place_of(given)) == str(Path(want) if "://" not in want else want)
    assert isinstance(place_of(given), RemotePath) == ("://" in want)


@pytest.mark.parametrize(
    "write",
    [
        lambda url, tmp: checkpoint.save(url, 1, {}, {}, {}),
        lambda url, tmp: Saver(url),
        lambda url, tmp: CSVLogger(url),
        lambda url, tmp: JSONLinesLogger(url),
        lambda url, tmp: save_json({}, url),
        lambda url, tmp: Recorder(0, 1).save(url),
        lambda url, tmp: check_writable(url, folder=True),
    ],
)
@pytest.mark.parametrize("url", ["nosuch://a/b", "http://127.0.0.1:9/x", Path("nosuch://a/b")])
def test_what_cannot_be_written_to_is_refused_by_name(write, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, CheckpointError), match=r"nosuch://a/b|http://127\.0\.0\.1:9/x"):
        write(url, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_place_of_a_place_is_the_same():
    for each in ("./s3:x", "./s3:/b/x", "file:///tmp/x", "memory://x/y", "a:b", "~/x"):
        assert place_of(str(place_of(each))) == place_of(each)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://nas/share/run", r"is on the host nas: a file here is file:///nas/share/run"),
        (" s3://b/x", "is a URL with blanks around it"), ("memory://b/x\n", "is a URL with blanks around it"),
        ("s3://", "names nothing there"), ("memory:///", "names nothing there"),
        ("file:run", "is no URL for want of slashes"), ("wasbs:b/x", "is no URL for want of slashes"),
        ("s3://b ucket/x", "s3://b ucket/x cannot be opened: .*URI"),
        ("s3://b/x#1/y", r"s3://b/x#1/y: what is behind # would be left out: write %23 for it"),
        ("s3://b/x/../y", "s3://b/x/../y: a URL here has no empty part, and no '.' or '..'"),
        ("memory://b/./y", "memory://b/./y: a URL here has no empty part"),
        ("gs://b/x//y", "gs://b/x//y: a URL here has no empty part"),
        ("dir://x", "dir://x(/.lock: nothing is written at| cannot be opened: )"),
        ("reference://x", "reference://x(/.lock: nothing is written at| cannot be opened: )"),
        ("run\0", r"'run\\x00' has a null byte"),
        ("az://b/../y", "az://b/../y: a URL here has no empty part"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use", ["save", "log", "read"])
def test_an_odd_url_is_refused_and_makes_no_folder(url, says, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, CheckpointError), match=says):
        if use == "save":
            checkpoint.save(url, 1, {}, {}, {})
        elif use == "log":
            load_log(f"csv:{url}")
        else:
            read_document(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("key", ["a b", "é/日本", "a+b&c=d", "a'b\"c", "a[1]|{x}", "~x;@y,(z)"])
def test_a_key_of_any_letters_is_that_object(s3, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import boto3

    place = place_of(f"{s3}/{key}/run")
    checkpoint.save(place, 1, {}, {"item": table(4, 1)}, {})
    (place / "log.csv").write_text("user,item,time\n1,2,3\n")
    assert checkpoint.steps(str(place)) == [1] and (place.parent / "run").is_dir()
    assert same(checkpoint.load(f"{place}/").tables["item"], by_key(table(4, 1)))
    found = boto3.client("s3").list_objects_v2(Bucket="bucket", Prefix=f"{key.strip('/')}/run/")
    assert "log.csv" in {each["Key"].rpartition("/")[2] for each in found["Contents"]}
    assert os.listdir(tmp_path) == []


def test_options_of_a_url_stay_behind_all_that_is_in_its_folder(monkeypatch):
    """Behind the name of a folder they would swallow those of its files: one object for all."""
    opened = []
    monkeypatch.setattr(
        "tritonrec.files.places._filesystem_of", lambda url: opened.append(url) or (None, url)
    )
    folder = place_of("s3://b/run/?region=eu-west-1&scheme=http")
    file = folder / "step-1" / "item.safetensors"
    assert str(file) == "s3://b/run/step-1/item.safetensors?region=eu-west-1&scheme=http"
    assert (file.name, file.suffix, str(file.parent.parent)) == (
        "item.safetensors",
        ".safetensors",
        str(folder),
    )
    assert place_of(str(file)) == file == place_of(Path(str(file)))
    _ = file._fs
    assert opened == [str(file)]
    assert str(place_of("memory://a?b/c") / "d") == "memory://a?b/c/d"


def test_a_log_and_a_checkpoint_at_one_url_are_in_one_folder(tmp_path):
    (folder := tmp_path / "a b").mkdir()
    for url in (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a b"):
        (folder / "log.csv").write_text("user,item,time\n1,2,3\n")
        assert (
            load_log(f"csv:{url}/log.csv").user.tolist() == load_log(f"csv:{url}/*.csv").user.tolist() == [1]
        )
        assert place_of(url) == folder


@pytest.mark.parametrize("of", [str, Path, os.fsencode], ids=["text", "path", "bytes"])
def test_logs_and_vocabularies_are_where_they_were_written(of, tmp_path):
    for folder in ("memory://kept", f"file://{tmp_path}/a%20b", str(tmp_path)):
        Vocabulary(["a", "b"]).save(of(f"{folder}/words.parquet"))
        assert Vocabulary.load(of(f"{folder}/words.parquet")).words.to_pylist() == ["a", "b"]
    (place_of("memory://kept") / "log.csv").write_text("user,item,time\n1,2,3\n")
    if of is not os.fsencode:
        assert load_log(of("memory://kept/log.csv")).user.tolist() == [1]


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the path is empty"):
        place_of("")
    assert place_of(".") == Path()


@pytest.mark.parametrize("url", ["s3:b/x", "gs:b", "memory:x", "https:x/y", "s3:"])
def test_a_url_without_slashes_is_refused_and_makes_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (url, Path(url)):
        with pytest.raises(
            ValueError, match=f"is no URL for want of slashes: write {url.replace(':', '://')}"
        ):
            checkpoint.save(path, 1, {}, {}, {})
    assert not list(tmp_path.iterdir())
    assert place_of(tmp_path / url) == tmp_path / url


def test_a_store_that_does_not_answer_has_a_limit(monkeypatch):
    assert with_limit("gs://b/x") == "gs://b/x?retry_limit_seconds=60"
    assert with_limit("gs://b/x?anonymous=true") == "gs://b/x?anonymous=true&retry_limit_seconds=60"
    for own in ("gs://b/x?retry_limit_seconds=5", "s3://b/x"):
        assert with_limit(own) == own
    given = []
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")

    class Opened:
        def from_uri(url):
            given.append(url)
            raise OSError("no answer")

    monkeypatch.setattr("pyarrow.fs.FileSystem", Opened)
    for opens in (lambda: filesystem_of("gs://b/x/*.csv"), lambda: place_of("gs://b/x").is_dir()):
        with pytest.raises((OSError, ValueError), match="no answer"):
            opens()
    assert given == ["gs://b/x?retry_limit_seconds=60"] * 2


def test_a_store_of_google_s_is_not_asked_without_credentials(tmp_path, monkeypatch):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUD_STORAGE_EMULATOR_ENDPOINT", "GCE_METADATA_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_GCLOUD_ADC_PATH_OVERRIDE", str(tmp_path / "mine.json"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(places, "METADATA_SERVER", server.getsockname())
        check_credentials("gs://b/x")
    words = "^gs://b/x.csv cannot be opened: there are no credentials of Google's: call `gcloud auth"
    for opens in (
        lambda: load_log("csv:gs://b/x.csv?user=a&item=b"),
        lambda: place_of("gs://b/x.csv").exists(),
    ):
        with pytest.raises((OSError, ValueError), match=words):
            opens()
    for url in ("gs://b/x?anonymous=true", "gs://anonymous@b/x", "s3://b/x"):
        check_credentials(url)
    (tmp_path / "mine.json").touch()
    check_credentials("gs://b/x")


def test_a_chain_of_protocols_is_a_url():
    memory = fsspec.filesystem("memory")
    memory.pipe("/chain/a.json", b"{}")
    assert read_document("simplecache::memory://chain/a.json") == b"{}"
    with pytest.raises(ValueError, match="nothing is written at simplecache::memory://"):
        save_json({}, "simplecache::memory://chain/b.json")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place_of("~/a/b") == place_of(Path("~/a/b")) == tmp_path / "a" / "b"
    assert place_of("a~/~b") == Path("a~/~b")


def test_what_is_local_only_says_so():
    with pytest.raises(ValueError, match="s3://a/b: the folder of a profile cannot be at a URL"):
        local_path(Path("s3://a/b"), "the folder of a profile")


def in_time(function, seconds=20):
    """The error of a call that may not hang."""
    found = []

    def call():
        try:
            function()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0] if found else None


def special(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_special_files_are_one_error_and_no_hang(kind, tmp_path):
    from tritonrec.harness.bench import load as load_baseline
    from tritonrec.harness.bisect import _log
    from tritonrec.harness.simulator.cost_files import load_json
    from tritonrec.harness.train.config import read_config
    from tritonrec.harness.train.run import Run

    os.chdir(tmp_path)  # a socket's name is short
    path = special(kind, Path("x"))
    words = {"pipe": "pipe", "folder": "folder|Is a directory", "socket": "socket", "device": "device"}[kind]
    reads = [read, load_baseline, _log, load_json, read_document]
    if kind != "folder":
        reads += [lambda path: read_config(path, Run), CSVLogger, lambda path: CSVLogger(path, 3)]
    for call in reads:
        error = in_time(lambda call=call: call(path))
        assert isinstance(error, (ValueError, OSError)) and str(path) in str(error), call
        assert any(word in str(error) for word in words.split("|")), (call, error)
    path.rmdir() if kind == "folder" else path.unlink()
    # as manifest and as part of a checkpoint and of an export
    described = {"tables": {"item": {"dim": 2, "seed": 1, "table_id": 0, "scale": 0.5}}, "features": {}}
    for name in ("manifest", "part"):
        checkpoint.save(f"{name}/saved", 1, {}, {"item": table(4, 1)}, {"embedding": described})
        export(f"{name}/saved", f"{name}/out")
        pattern = "step-*.json" if name == "manifest" else "step-*/item*"
        (saved,) = Path(name, "saved").glob(pattern)
        (exported,) = Path(name, "out").glob("manifest.json" if name == "manifest" else "item*")
        for file, load in (
            (saved, lambda: checkpoint.load(f"{name}/saved")),  # noqa: B023
            (exported, lambda: Predictor.load(f"{name}/out")),  # noqa: B023
        ):
            folder, last = os.path.split(file)
            file.unlink()
            os.chdir(folder)
            special(kind, Path(last)) if len(last) < 90 or kind != "socket" else os.mkfifo(last)
            os.chdir(tmp_path)
            error = in_time(load)
            assert isinstance(error, (ValueError, CheckpointError)) and last in str(error), error


def test_memory_is_of_this_process():
    assert isinstance(place_of("memory://a")._fs, type(fsspec.filesystem("memory")))


def test_documents_that_are_nested_too_deeply_are_one_error(tmp_path):
    from tritonrec.harness.bench import load as load_baseline
    from tritonrec.harness.simulator.cost_files import load_json
    from tritonrec.harness.train.config import read_config
    from tritonrec.harness.train.run import Run

    path = tmp_path / "deep"
    for read_it, text in (
        (load_json, "[" * 100_000),
        (load_baseline, "[" * 100_000),
        (lambda file: read_config(file, Run), "a = " + "[" * 100_000),
        (lambda file: Predictor.load(file.parent), "[" * 100_000),
    ):
        path.write_text(text)
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError):
            read_it(path)


@pytest.mark.if_changed
@pytest.mark.parametrize("folder_at", [new_folder, published])
def test_a_folder_that_another_run_wrote_meanwhile_is_its_own(folder_at, tmp_path):
    with (
        pytest.raises(FileExistsError, match="out was written meanwhile by another run: choose another name"),
        folder_at(tmp_path / "out") as scratch,
    ):
        (scratch / "ours").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out/theirs").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/theirs"]


def test_a_listing_is_that_of_this_moment():
    """File systems of fsspec keep listings, and another process may have written since."""

    class Store:
        there, known = ["b/run/1"], None

        def ls(self, place, detail):
            self.known = self.known or [*self.there]
            return self.known

        def invalidate_cache(self):
            self.known = None

    store = Store()
    folder = RemotePath("s3://b/run", (store, "b/run"))
    assert folder.names() == ["1"]
    store.there.append("b/run/2")
    assert folder.names() == ["1", "2"]


def test_nothing_is_uploaded_where_a_file_could_be_seen_half_written(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(ValueError, match="nothing is written at http://"):
        RemotePath("http://127.0.0.1:9/a").upload(tmp_path / "a")
