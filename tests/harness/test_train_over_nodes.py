"""Promise: `tritonrec train --nodes` has the bits of one step; what cannot be is refused before it starts."""

import json

import pytest
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.train.summary import tables_line

JOB = [
    "--data",
    "zipf:users=40,items=60,seed=1",
    "--steps",
    "4",
    "--batch-size",
    "8",
    "--dim",
    "8",
    "--max-seq-len",
    "6",
]


def trained(*arguments, code=0):
    found = CliRunner().invoke(app, ["train", *JOB, *arguments])
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_nodes_have_the_bits_of_one_step_and_a_line_of_bytes(tmp_path):
    trained("--world-size", "4", "--json", str(tmp_path / "one"))
    trained("--world-size", "4", "--nodes", "2", "--json", str(tmp_path / "two"))
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two["digest"] == one["digest"] and (one["nodes"], two["nodes"]) == (1, 2)
    assert one["lookups"]["node_bytes"] == 0 < two["lookups"]["node_bytes"]
    counts = dict(two["lookups"], key_bytes=2_000_000, row_bytes=3_000_000, node_bytes=1_000_000)
    line = tables_line(two | {"lookups": counts, "steps_run": 2}).splitlines()[-1]
    assert line == "2 nodes: 2.00 MB a step between them, 0.50 MB inside"
    assert "nodes" not in tables_line(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "3"], "3 nodes do not divide 4 ranks"),
        (["--nodes", "2", "--replicas", "2"], "lookups in two steps have no replicas"),
        (["--nodes", "2", "--consistency", "window"], "would have other bits"),
        (["--nodes", "2", "--dedup", "none"], "need dedup before the exchange"),
        (["--nodes", "2", "--elastic"], "--nodes does not go with --elastic"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(options, message):
    assert message in trained("--world-size", "4", *options, code=2)
