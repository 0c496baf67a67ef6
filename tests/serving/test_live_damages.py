"""Promise: a delta whose checksum fits, with any field or tensor of it lost or another one, is refused by a
`LiveError`, and so is a damaged export at the server's start; what is served stays in every bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict

import pytest
import torch
from live_parts import (
    Training,
    assert_has,
    opened,
    places,
    settled,
    state_of,
    traced_once,  # noqa: F401, a fixture of this module
)
from safetensors.torch import save
from served_models import export_hstu

from tritonrec.checkpoint.manifest import add_checksum
from tritonrec.serving.live import Follower, LiveError
from tritonrec.serving.live.wire import MAGIC, unpack
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.bodies import Retrieve
from tritonrec.serving.server.run import Source

VALUES = (
    None, "x", -7, {}, [], 1.5, float("nan"), True, 10**30, {"item": "x"}, [["item", 5]], [[["no"], 5]],
    [[[], 0]],
)  # fmt: skip
FREE = {"writer": ("x",), "published_at": (1.5, 10**30)}
"""Values of a header that another publication could have."""
TENSORS = {
    "scalar": torch.sum,
    "other dtype": lambda x: x.to(torch.float64),
    "narrow": lambda x: x.to(torch.int32 if x.dtype == torch.int64 else torch.bfloat16),
    "one dimension more": lambda x: x[..., None],
    "wide": lambda x: torch.stack([x, x], -1).flatten(-2),
    "shorter": lambda x: x[:-1],
    "repeated": lambda x: x[[0, *range(len(x) - 1)]],
    "backwards": lambda x: x.flip(0),
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A sink with deltas 2 to 4, the last of which has rows, tombstones and dense values, and the states."""
    folder = tmp_path_factory.mktemp("damaged") / "sink"
    training, states = Training(), []
    with opened(training, folder, snapshot_every=100) as publisher:
        for _ in range(4):
            settled(publisher)
            states.append(state_of(training.trainer))
            if len(states) < 4:
                training.run(publisher, 2)
    training.close()
    return folder, states


def damaged(header, tensors):
    """What was done, header and tensors."""
    for name, value in header.items():
        rest = {each: header[each] for each in header if each != name}
        yield f"lost {name}", rest, tensors
        yield f"renamed {name}", {**rest, "renamed": value}, tensors
        for other in VALUES:
            same = type(other) is type(value) and other == value
            # words that this run does not have have no spelling
            if not same and other not in FREE.get(name, ()) and (name, other) != ("spelled", {"item": "x"}):
                yield f"{name} {other}", {**header, name: other}, tensors
    for name, value in tensors.items():
        rest = {each: tensors[each] for each in tensors if each != name}
        yield f"lost {name}", header, rest
        yield f"renamed {name}", header, {**rest, "renamed": value}
        for what, damage in TENSORS.items():
            free = name.endswith("weights") and name.startswith("table") and what in ("repeated", "backwards")
            if not free:  # no delta has a digest of its rows
                yield f"{what} {name}", header, {**rest, name: damage(value)}
    both = torch.cat([tensors["table/item/erased"], tensors["table/item/ids"][:1]]).unique()
    yield "erased and there", header, {**tensors, "table/item/erased": both}
    yield "one more", header, {**tensors, "more": torch.ones(2, dtype=torch.float32)}


@pytest.mark.if_changed
def test_no_part_of_a_delta_can_be_another_one(followed, tmp_path):
    folder, states = shutil.copytree(followed[0], tmp_path / "sink"), followed[1]
    last = folder / f"delta-{4:012d}.00000"
    whole = last.read_bytes()
    header, tensors = unpack(whole, "")
    kinds = {name.rpartition("/")[2] if name.startswith("table") else name[:5] for name in tensors}
    assert kinds == {"ids", "weights", "erased", "dense"}
    last.unlink()
    follower = Follower.open(folder)
    for what, head, own in damaged(asdict(header), tensors):
        body = save({name: each.contiguous() for name, each in own.items()}, {"live": json.dumps(head)})
        last.write_bytes(b"".join([MAGIC, hashlib.sha256(body).digest(), body]))
        try:
            assert not follower.poll(), what  # such as one of many parts, which may still come
        except LiveError as error:
            assert "delta 4" in str(error), what
        assert_has(follower.predictor, states[2])
    last.write_bytes(whole)
    assert follower.poll()
    assert_has(follower.predictor, states[3])


def damaged_exports(path):
    """What was done, and the file with its content, None where it is gone."""
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        half = len(content) // 2
        changed = content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]
        for other in (None, b"", content[:-3], content + b"x", changed, bytes(len(content))):
            yield f"{file.name} {other and len(other)}", file.name, other
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("manifest_sha256")
    for place in [*places(manifest)][1:]:
        for value in VALUES[:4]:
            body = json.loads(json.dumps(manifest))
            inner = body
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            yield f"{value} {place}", "manifest.json", json.dumps(add_checksum(body)).encode()


@pytest.mark.slow  # test_export_manifest.py has one value of each kind
@pytest.mark.filterwarnings("ignore:the export says")
def test_a_server_starts_with_the_whole_model_or_names_what_is_wrong(tmp_path):
    export_hstu(tmp_path)
    path, request = tmp_path / "two", Retrieve(histories=[[3, 7]], k=4)
    [right] = Source(path).open(ServerConfig()).answer([request])
    refused = 0
    for what, name, content in damaged_exports(path):
        copy = shutil.copytree(path, tmp_path / "copy", dirs_exist_ok=True)
        (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
        try:
            [answer] = Source(copy).open(ServerConfig()).answer([request])
        except ValueError:
            refused += 1
            continue
        if isinstance(answer, ValueError):  # a model of fewer or other tokens, which says so to each request
            assert "max_seq_len" in what or "timestamps" in what, what
        else:
            assert {**answer, "step": 0} == {**right, "step": 0}, what
    assert refused > 100
