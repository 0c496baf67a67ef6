"""The one door of every path that a user names: a local `Path`, or a `RemotePath` at a URL.

``s3://``, ``gs://`` and ``hdfs://`` are pyarrow's own, any other protocol is fsspec's (``az://``,
``memory://``), as where logs are read. A URL never becomes a local folder: what cannot be at one is refused
by `local_path`. Objects appear whole when they are closed, so what consists of several (a checkpoint, an
export) is complete when its manifest is there, which is written last.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote

_URL = re.compile(r"((?:[A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)
"""Also with one slash, which is what `pathlib` leaves of two, and as a chain (``simplecache::s3://``)."""

_HALF_URL = re.compile(r"(s3a?|gc?s|az|abfss?|adl|wasbs?|hdfs|https?|s?ftp|memory|file):(.*)", re.DOTALL)
"""A store's URL without slashes."""

WRITABLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
"""Protocols of stores whose objects appear whole."""

_ARROWS = {"s3", "gs", "gcs", "hdfs"}
"""Protocols that pyarrow has in every build."""

UPLOAD_SECONDS = 30.0
"""Between two uploads of a log that grows at a URL."""

STORE_SECONDS = 60
"""After which a store of Google's that does not answer is an error; pyarrow goes on for 15 minutes."""

METADATA_SERVER = ("169.254.169.254", 80)
"""By which Google's machines have credentials."""

METADATA_SECONDS = 3.0
"""For it to answer."""

LARGEST_DOCUMENT = 1 << 30
"""Bytes of a document that is read at once."""


class RemotePath:
    """A place at a URL, with the part of `pathlib.Path` that is used here. OSError where a store fails.

    Attributes:
        url: as given, with two slashes.
    """

    def __init__(self, url: str, parent: tuple[Any, str] | None = None):
        self._base, self._options = _without_options(url)
        self.url, self._opened = self._base + self._options, parent

    @property
    def _fs(self) -> Any:
        return self._filesystem[0]

    @property
    def _place(self) -> str:
        return self._filesystem[1]

    @property
    def _filesystem(self) -> tuple[Any, str]:
        """The file system and the path there; opened when it is first used."""
        if self._opened is None:
            filesystem, place = _filesystem_of(self.url)
            self._opened = filesystem, place.rstrip("/")
        return self._opened

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: RemotePath) -> bool:
        return self.url < other.url

    def __truediv__(self, name: str) -> RemotePath:
        opened = self._opened and (self._fs, f"{self._place}/{name}")
        return RemotePath(f"{self._base}/{name}{self._options}", opened)

    def __getstate__(self) -> str:
        return self.url

    def __setstate__(self, url: str) -> None:
        self.__init__(url)  # type: ignore[misc]

    @property
    def name(self) -> str:
        """The last part."""
        return self._base.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """`name` without its suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """Of `name`, as ``".csv"``."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder."""
        opened = self._opened and (self._fs, self._place.rpartition("/")[0])
        return RemotePath(self._base.rpartition("/")[0] + self._options, opened)

    def absolute(self) -> RemotePath:
        """Itself."""
        return self

    resolve = absolute

    def require_writable(self) -> None:
        """Raise ValueError for a protocol whose files could be seen half written."""
        protocol = self.url.partition("://")[0]
        if protocol not in WRITABLE:
            raise ValueError(
                f"{self.url}: nothing is written at {protocol}://, whose files do not appear whole; "
                f"{', '.join(sorted(WRITABLE))} and local folders are written to"
            )

    def exists(self) -> bool:
        """Whether an object or a folder with objects is there."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether an object is there."""
        found = self._info()
        return found is not None and found["type"] == "file"

    def is_dir(self) -> bool:
        """Whether a folder with objects is there."""
        found = self._info()
        return found is not None and found["type"] == "directory"

    def size(self) -> int:
        """Bytes of the object; FileNotFoundError where there is none."""
        found = self._info()
        if found is None or found["type"] != "file":
            raise FileNotFoundError(2, os.strerror(2), self.url)
        return int(found["size"])

    def names(self) -> list[str]:
        """Names in the folder, ascending; none where nothing is there."""
        with self._errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {each.rstrip("/").rpartition("/")[2] for each in found if each.rstrip("/") != self._place}
        return sorted(names - {""})

    def read_bytes(self) -> bytes:
        """The object."""
        with self._errors():
            return bytes(self._fs.cat_file(self._place))

    def read_text(self) -> str:
        """The object, UTF-8."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write the object at once."""
        self.require_writable()
        with self._errors(), self._fs.open(self._place, "wb") as file:
            file.write(content)

    def write_text(self, text: str) -> None:
        """Write the object at once, UTF-8."""
        self.write_bytes(text.encode())

    def upload(self, local: Path) -> None:
        """Write the object from a local file."""
        self.require_writable()
        with self._errors(), local.open("rb") as file, self._fs.open(self._place, "wb") as target:
            shutil.copyfileobj(file, target, 1 << 22)

    def download(self, local: Path) -> None:
        """Write a local file from the object."""
        with self._errors(), self._fs.open(self._place, "rb") as source, local.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 22)

    def open(self, mode: str = "r", newline: str | None = None) -> IO[Any]:
        """To read (``"r"``, ``"rb"``), or to write a log (``"a"``, ``"w"``): `GrowingText`."""
        if mode == "rb":
            with self._errors():
                return self._fs.open(self._place, "rb")
        if mode == "r":
            return io.TextIOWrapper(io.BytesIO(self.read_bytes()), encoding="utf-8", newline=newline)
        if mode not in ("a", "w"):
            raise ValueError(f"{self.url} is opened with r, rb, a or w, not {mode}")
        return GrowingText(self, self.read_text() if mode == "a" and self.is_file() else "")

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Nothing: folders come with their objects."""
        self.require_writable()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        with self._errors():
            try:
                self._fs.rm_file(self._place)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def rmdir(self) -> None:
        """Remove the mark that a store may keep of a folder without objects."""
        with self._errors(), suppress(FileNotFoundError):
            self._fs.rmdir(self._place)

    def _info(self) -> dict[str, Any] | None:
        with self._errors():
            self._fs.invalidate_cache()
            try:
                return dict(self._fs.info(self._place))
            except FileNotFoundError:
                return None

    def _errors(self) -> AbstractContextManager[None]:
        _ = self._filesystem  # whose errors are about the URL itself
        return _store_errors(self.url)


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Errors of a store's own types as OSError naming the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(2, os.strerror(2), url) from error
    except OSError as error:
        # a library's own kind may be made of other arguments, as urllib's HTTPError
        kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
        raise kind(error.errno or 5, str(error), url) from error
    except Exception as error:
        raise OSError(5, f"{type(error).__name__}: {error}", url) from error


class NamedErrors:
    """A file system of fsspec's, or a file of it, whose own errors are OSError naming the path."""

    def __init__(self, wrapped: Any, path: str = ""):
        self._wrapped, self._path = wrapped, path

    def __reduce__(self) -> Any:
        return NamedErrors, (self._wrapped, self._path)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            path = self._path or next((each for each in args if isinstance(each, str)), "")
            with _store_errors(path):
                result = found(*args, **options)
            return NamedErrors(result, path) if name == "open" else result

        return call


Place = Path | RemotePath


class GrowingText(io.StringIO):
    """The text of a log at a URL. Objects cannot grow: it is written anew now and then, and when closed."""

    def __init__(self, place: RemotePath, text: str):
        place.require_writable()
        super().__init__(text, newline="")
        self.seek(0, io.SEEK_END)
        self._target, self._uploaded = place, time.monotonic()
        place.write_text(text)

    def flush(self) -> None:
        """Upload, if the last upload is longer ago than `UPLOAD_SECONDS`."""
        if time.monotonic() - self._uploaded >= UPLOAD_SECONDS:
            self._upload()

    def close(self) -> None:
        """Upload."""
        if not self.closed:
            self._upload()
        super().close()

    def _upload(self) -> None:
        self._target.write_text(self.getvalue())
        self._uploaded = time.monotonic()


def require_current_folder() -> None:
    """Raise FileNotFoundError where the current folder was removed: MKL ends the process in such a one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the current folder is not there any more, and libraries of torch end the process in such a one: "
            "change to another (cd, os.chdir)"
        ) from None


def place_of(path: str | bytes | os.PathLike[str] | RemotePath) -> Place:
    """Where a path is: local (also ``file://``), or at a URL.

    ``~`` is the home folder; ``file://`` has its characters escaped (``%20``), as in any URL. Nothing is
    opened: the first use raises ValueError for an unknown protocol, or a missing package. Raises ValueError
    for an empty path, and a URL without slashes, without a name, with blanks around it or of another host, or
    of an object that stores and libraries name in several ways.
    """
    if isinstance(path, RemotePath):
        return path
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"a path or a URL is a text or a pathlib.Path, got {path!r}")
    text = os.fsdecode(path)
    if not text:  # as of a variable of the environment that is not set
        raise ValueError("the path is empty: the current folder is '.'")
    if "\0" in text:
        raise ValueError(f"{text!r} has a null byte, and no path has one")
    if text != text.strip() and _URL.match(text.strip()):
        raise ValueError(f"{text!r} is a URL with blanks around it: leave them out")
    found = _URL.match(text)
    if found is None:
        if half := _HALF_URL.match(text):
            raise ValueError(
                f"{text} is no URL for want of slashes: write {half[1]}://{half[2]}, or "
                "the absolute path of a local file of this name"
            )
        local = Path(os.path.expanduser(text))
        # pathlib has dropped the ./ of ./s3:/b, which would be a URL to whoever looks next.
        return local.absolute() if _URL.match(str(local)) or _HALF_URL.match(str(local)) else local
    protocol, rest = found[1].lower(), found[2]
    if protocol in ("file", "local"):
        host = "" if rest.startswith("/") else rest.partition("/")[0]
        if host == "localhost":
            rest = rest.removeprefix(host)
        elif host and text[len(protocol) :].startswith("://"):  # pathlib leaves one slash of three
            raise ValueError(f"{text} is on the host {host}: a file here is file:///{rest}")
        return Path(f"/{unquote(rest).lstrip('/')}")
    if not rest.strip("/"):
        raise ValueError(f"{text} names nothing there: write {protocol}://BUCKET/FOLDER")
    place = RemotePath(f"{protocol}://{rest.lstrip('/')}")
    if protocol in WRITABLE:
        _check_key(place)
    return place


def _without_options(url: str) -> tuple[str, str]:
    """A URL without slashes behind it, and the ``?region=eu-west-1`` that pyarrow takes behind it."""
    base, mark, options = url.partition("?") if url.partition("://")[0] in _ARROWS else (url, "", "")
    return base.rstrip("/"), mark + options


def _check_key(place: RemotePath) -> None:
    """Stores take any text for a key, and URLs do not: raise ValueError for one that would be another's."""
    url, parts = place.url, place._base.partition("://")[2].split("/")
    if "" in parts or "." in parts or ".." in parts:
        raise ValueError(f"{url}: a URL here has no empty part, and no '.' or '..' between its slashes")
    if "#" in url and url.partition("://")[0] in _ARROWS:
        raise ValueError(f"{url}: what is behind # would be left out: write %23 for it")


def given_path(text: str | os.PathLike[str]) -> Path:
    """A path of a command line or a file of settings, as a `Path` that `place_of` finds where the text is.

    `pathlib` folds slashes and dots, and with them a URL's host: raises ValueError for a URL that it would
    change, and what `place_of` raises.
    """
    place = place_of(text)
    if isinstance(place, Path):
        return place
    path = Path(text)
    if place_of(path) != place:
        raise ValueError(f"{text}: a URL here has no empty part, and no '.' or '..' between its slashes")
    return path


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A local path; ValueError naming a URL, at which `what` cannot be."""
    found = place_of(path)
    if isinstance(found, RemotePath):
        raise ValueError(f"{found}: {what} cannot be at a URL: give a local path, and copy it")
    return found


def become(scratch: Path, out: Path) -> None:
    """Rename a folder that is whole to `out`; FileExistsError where another run was first."""
    try:
        os.replace(scratch, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(f"{out} was written meanwhile by another run: choose another name") from error


def read_document(path: str | os.PathLike[str] | RemotePath, what: str = "file") -> bytes:
    """The content of a file that is read at once.

    Raises FileNotFoundError, and ValueError naming a pipe, a device, a folder or a file that is too long,
    which could block or fill the memory.
    """
    place = place_of(path)
    if isinstance(place, RemotePath):
        size = place.size()
    else:
        status = place.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{place} is {kind_of(status.st_mode)}, and a {what} is a regular file")
        size = status.st_size
    if size > LARGEST_DOCUMENT:
        raise ValueError(f"{place} has {size} bytes, and a {what} has at most {LARGEST_DOCUMENT}")
    return place.read_bytes()


def kind_of(mode: int) -> str:
    """What a file of a mode (`os.stat_result.st_mode`) is, in words."""
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "no regular file")


@contextmanager
def staged(target: RemotePath, name: str) -> Iterator[Path]:
    """Yield a local path; the file that is written there is uploaded to `target` at the end."""
    target.require_writable()
    with tempfile.TemporaryDirectory(prefix="tritonrec-") as folder:
        local = Path(folder, name)
        yield local
        target.upload(local)


def with_limit(url: str) -> str:
    """A URL for pyarrow, where it waits for `STORE_SECONDS` at most; a limit in the URL stays."""
    if not url.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}retry_limit_seconds={STORE_SECONDS}"


def check_credentials(url: str) -> None:
    """Raise ValueError where there are no credentials for Google's store, whose client tries for minutes."""
    mine = Path.home() / ".config/gcloud/application_default_credentials.json"
    named = ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUD_STORAGE_EMULATOR_ENDPOINT", "GCE_METADATA_ROOT")
    if (
        not url.startswith(("gs://", "gcs://"))
        or any(os.environ.get(name) for name in named)
        or re.search(r"://anonymous@|[?&](anonymous=true|endpoint_override=)", url)
        or Path(os.environ.get("GOOGLE_GCLOUD_ADC_PATH_OVERRIDE") or mine).exists()
    ):
        return
    try:
        socket.create_connection(METADATA_SERVER, METADATA_SECONDS).close()
    except OSError as error:
        raise ValueError(
            "there are no credentials of Google's: call `gcloud auth application-default login`, name a key "
            "file by GOOGLE_APPLICATION_CREDENTIALS, or write anonymous=true behind a ? for public files"
        ) from error


def check_protocol(url: str) -> None:
    """Raise ValueError where no package here knows the protocol of a URL. No store is asked."""
    if url.partition("://")[0] not in _ARROWS:  # s3:// would look for its region
        filesystem_at(url)


def filesystem_at(url: str) -> tuple[Any, str]:
    """The file system of a URL, pyarrow's where it has one and else fsspec's, and the path there."""
    try:
        from pyarrow import ArrowInvalid, ArrowNotImplementedError
        from pyarrow.fs import FileSystem

        check_credentials(url)
        try:
            # A key may have blanks and any letters, which a URI has escaped; a bucket has none.
            *bucket, key = with_limit(url).split("/", 3)
            return FileSystem.from_uri("/".join([*bucket, quote(key, safe=":/?#@!$&'()*+,;=%~")]))
        except (ArrowInvalid, ArrowNotImplementedError):
            if url.partition("://")[0] in _ARROWS:  # and it is the URL that is wrong
                raise
            import fsspec

            return fsspec.core.url_to_fs(url)
    except Exception as error:  # a protocol's own, of arguments that it lacks, say
        raise ValueError(f"{url} cannot be opened: {error}") from error


def _filesystem_of(url: str) -> tuple[Any, str]:
    """A file system of fsspec's interface, and the path there."""
    filesystem, place = filesystem_at(url)
    if type(filesystem).__module__.startswith("pyarrow."):
        from fsspec.implementations.arrow import ArrowFSWrapper

        filesystem = ArrowFSWrapper(filesystem)
    return filesystem, place
