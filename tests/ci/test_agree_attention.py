"""The comparison with public references tells a right one from wrong ones, and says which option is wrong."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "ci" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import agree_attention  # noqa: E402

# The published formula (Zhai et al., ICML 2024, equation 2), one sequence at a time.
RIGHT = """
import a_package_that_nobody_has
import torch

DEVICE = torch.cuda.get_device_properties(0)


def pytorch_hstu_mha(max_seq_len, alpha, q, k, v, seq_offsets, num_targets=None, max_attn_len=0):
    outs = []
    for b in range(len(seq_offsets) - 1):
        start, stop = int(seq_offsets[b]), int(seq_offsets[b + 1])
        place = torch.arange(stop - start)
        history = stop - start - (0 if num_targets is None else int(num_targets[b]))
        rank = place.clamp(max=history)
        back = rank[:, None] - rank[None, :]
        seen = back > 0
        if max_attn_len:
            seen = seen & (back <= max_attn_len)
        seen = seen | (place[:, None] == place[None, :])
        x = alpha * torch.einsum("ihd,jhd->hij", q[start:stop], k[start:stop])
        p = x * torch.sigmoid(x) * seen / max_seq_len
        outs.append(torch.einsum("hij,jhd->ihd", p, v[start:stop]))
    return torch.cat(outs)
"""
# what is wrong: text to replace, its replacement, options that meet and must be told to disagree
WRONG = {
    "half_of_x": ("x * torch.sigmoid(x)", "x / 2", {"causal", "targets", "window", "window, targets"}),
    "sees_later_tokens": ("seen = back > 0", "seen = back != 0", {"causal", "window", "targets"}),
    "window_off_by_one": ("<= max_attn_len", "< max_attn_len", {"window", "window, targets"}),
    "targets_see_targets": ("place.clamp(max=history)", "place", {"targets", "window, targets"}),
    "no_diagonal": ("seen | (place[:, None] == place[None, :])", "seen", {"causal", "targets", "window"}),
    "sees_nothing": ("seen | (place", "seen & (place", {"causal", "targets", "window"}),
}


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    """The options that this file's reference has, and one that it lacks."""
    kept = ("causal", "targets", "window", "window, targets", "target groups of 3")
    monkeypatch.setattr(agree_attention, "LENGTHS", [40, 0, 1, 9])
    monkeypatch.setattr(agree_attention, "TARGETS", [18, 0, 1, 0])
    small = agree_attention.cases()
    monkeypatch.setattr(agree_attention, "cases", lambda: {name: small[name] for name in kept})


def run(tmp_path, capsys, text):
    """Exit status, and the verdict of each row that meets."""
    path = tmp_path / "reference.py"
    path.write_text(text)
    status = agree_attention.main(["--source", f"mine={path}"])
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line[:1] == "|"]
    return status, {row[1]: row[2] for row in cells[2:]}, printed


def test_the_published_formula_agrees(tmp_path, capsys):
    status, verdicts, printed = run(tmp_path, capsys, RIGHT)
    assert status == 0
    assert verdicts == dict.fromkeys(("causal", "targets", "window", "window, targets"), "agrees")
    assert "Does not meet, no target_group_size: target groups of 3." in printed
    assert "4 of 4 that meet agree." in printed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reference_disagrees(tmp_path, capsys, name):
    before, after, expected = WRONG[name]
    assert RIGHT.count(before) == 1
    status, verdicts, _ = run(tmp_path, capsys, RIGHT.replace(before, after))
    assert status == 1
    assert expected <= {option for option, verdict in verdicts.items() if verdict == "DISAGREES"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine", "give NAME=FILE with a Python file that exists"),
        ("mine=/not/there.py", "give NAME=FILE with a Python file that exists"),
        (f"mine={__file__}", "the file defines no reference that is known"),
    ],
)
def test_a_source_that_is_none_is_named(capsys, source, message):
    with pytest.raises(SystemExit):
        agree_attention.main(["--source", source])
    assert message in capsys.readouterr().err
