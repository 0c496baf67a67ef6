"""Promise: the settings of dataclasses are options; words fill them, or are refused by one error."""

from dataclasses import dataclass, field
from typing import Literal

import commands
import pytest
import typer
from typer.testing import CliRunner

from tritonrec.embedding import Eviction, PrecisionTiers
from tritonrec.harness import cli
from tritonrec.harness.cli.options import with_options
from tritonrec.harness.cli.words import eviction, precision_tiers
from tritonrec.settings import seed_setting, setting


@dataclass(frozen=True)
class Inner:
    widths: tuple[int, ...] = setting((3, 4), "Widths.", 1, 9)
    merge: bool = setting(True, "Merge.")
    seed: int = seed_setting()
    hidden: int = 5


@dataclass(frozen=True)
class Outer:
    name: str
    mode: Literal["slow", "fast"] = setting("slow", "How fast.")
    share: float | None = setting(None, "A share.", 0, 1, option="part")
    inner: Inner = field(default_factory=Inner)
    seed: int = seed_setting()

    def __post_init__(self):
        if self.share == 0.5:
            raise ValueError("0.5 is no share")


DEFAULT = Outer("o", inner=Inner(widths=(7,), hidden=6))


def run(*words, only=None):
    """The exit status, the text, and the dataclass that a command gets for these words."""
    got = []

    @with_options(only)
    def command(plan: Outer = DEFAULT, count: int = 2) -> None:
        got.append(plan)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words])
    return result.exit_code, result.output, *got


def test_without_words_a_command_gets_its_default():
    assert run() == (0, "", DEFAULT)


def test_words_fill_fields_at_any_depth_and_one_seed_goes_to_all():
    words = [
        "--mode",
        "fast",
        "--part",
        "0.25",
        "--widths",
        "1,9",
        "--no-merge",
        "--seed",
        "-3",
        "--count",
        "4",
    ]
    code, _, plan = run(*words)
    assert code == 0 and plan == Outer("o", "fast", 0.25, Inner((1, 9), False, -3, 6), -3)
    assert type(plan.mode) is str and plan.inner.widths == (1, 9)


def test_the_help_has_defaults_ranges_and_words_of_the_fields():
    text = run("--help")[1]
    for part in ("Widths. [default: 7]", "<slow | fast>", "How fast.", "0<=x<=1", "--no-merge", "--count"):
        assert part in text, text
    assert "hidden" not in text and "--name" not in text
    assert "Do not merge." in text and "--merge" not in text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_value_in_the_help_is_cut_at_80_columns(command):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0 and "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_help_of_train_has_a_panel_for_each_group():
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["train", "--help"])
    panels = [line.split(" ─")[0] for line in result.output.splitlines() if line.startswith("╭─")]
    assert panels[-1].startswith("╭─ Slipstream") and len(set(panels)) == len(panels) == 8


@pytest.mark.parametrize("words", ["--mode other", "--part 2", "--widths 0", "--widths 1,x", "--hidden 1"])
def test_words_outside_of_a_field_are_refused(words):
    code, text, *plans = run(*words.split())
    assert code == 2 and not plans and words.split()[0] in text


def test_an_error_of_the_dataclass_is_one_line():
    assert run("--part", "0.5")[:2] == (2, "error: 0.5 is no share\n")


def test_a_command_offers_some_settings_only():
    assert run("--part", "0.25", only=("part",))[2].share == 0.25
    assert run("--seed", "1", only=("part",))[0] == 2
    with pytest.raises(TypeError, match="command has no settings named sahre"):
        run(only=("sahre",))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_shows_the_first_sentence_of_each(name):
    assert commands.COMMANDS[name].help.partition("\n\n")[0].replace("\n", " ") == cli.COMMANDS[name]


pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", None),
        ("lru:500", Eviction("lru", capacity=500)),
        ("lfu:500:20", Eviction("lfu", capacity=500, every=20)),
        ("ttl:7:2", Eviction("ttl", ttl=7, every=2)),
        ("lru:2GiB", Eviction("lru", capacity="2GiB")),
        ("lfu:64MiB:3", Eviction("lfu", capacity="64MiB", every=3)),
    ],
)
def test_words_become_an_eviction(words, expected):
    assert eviction(words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", None), ("4:100", PrecisionTiers(4, 100)), ("2GiB:7", PrecisionTiers("2GiB", 7))],
)
def test_words_become_precision_tiers(words, expected):
    assert precision_tiers(words) == expected


@pytest.mark.parametrize(
    ("parse", "words", "named"),
    [
        (eviction, "lru", r"--evict takes lru:ROWS, .* got 'lru'"),
        (eviction, "fifo:3", "--evict takes"),
        (eviction, "lru:many", "--evict takes whole numbers, got 'lru:many'"),
        (eviction, "lru:0", "needs capacity of at least 1, got 0"),
        (eviction, "lru:0GiB", "needs capacity of at least 1, got 0"),
        (eviction, "lru:2ZiB", "capacity must be bytes, or such as '512MiB' or '2GiB', got '2ZiB'"),
        (eviction, "ttl:2GiB", "--evict takes whole numbers, got 'ttl:2GiB'"),
        (precision_tiers, "3", "--precision-tiers takes THRESHOLD:EVERY or SIZE:EVERY, got '3'"),
        (precision_tiers, "0MiB:3", "PrecisionTiers need a size of at least 1 byte, got '0MiB'"),
        (precision_tiers, "2GiB:few", "--precision-tiers takes whole numbers, got '2GiB:few'"),
        (precision_tiers, "2ZiB:3", "threshold of PrecisionTiers must be bytes, or such as '512MiB'"),
        (precision_tiers, "300:2", "threshold must be in .1, 255., got 300"),
    ],
)
def test_other_words_are_refused(parse, words, named):
    with pytest.raises(ValueError, match=named):
        parse(words)
