"""Promise: a run's settings are a file that makes the same run; whatever is wrong in it is named."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import commands
import pytest

from tritonrec import checkpoint
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, PrecisionTiers, TablePolicy
from tritonrec.harness import cli
from tritonrec.harness.cli import declared
from tritonrec.harness.cli.train import RUN
from tritonrec.harness.job import Job
from tritonrec.harness.train.config import from_tables, keys_of, read_config, tables_of, to_toml
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run, StoppingRule
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

OTHER = Run(
    Job(
        'csv:/tmp/ä "quoted" \\ \n\x7f.csv', "grm", batch_size=7, lr=1e-20, seed=-3, merge=False, bottom=(3,),
        sizes=HSTUConfig(dim=16, heads=4, recompute=(), dropout=0.0, relative_bias=True),
        policy=TablePolicy(Eviction("ttl", ttl=9, every=2), 3, PrecisionTiers(2, 100)),
    ),
    "dbp",
    WindowConfig(3, "window", clustering=True, max_grad_norm=math.inf, seed=-3),
    "sgd", steps=9, checkpoint=Path("a b"), early_stopping=StoppingRule("GAUC/click", 2, "max"),
)  # fmt: skip


def read(tmp_path, text, plan=RUN):
    (tmp_path / "run.toml").write_text(text)
    return read_config(tmp_path / "run.toml", plan)


@pytest.mark.parametrize("text", ["", "# steps = 3\n", "[job]\n[job.sizes]\n", "\ufeff"])
def test_a_file_that_sets_nothing_is_refused(tmp_path, text):
    """As one that was cut off: all defaults would be trained, without a word."""
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=r"run\.toml sets nothing: leave --config out"):
        read_config(tmp_path / "run.toml", Run(Job()))


@pytest.mark.parametrize("run", [RUN, OTHER], ids=["default", "other"])
def test_what_is_written_is_read(tmp_path, run):
    assert read(tmp_path, to_toml(tables_of(run))) == run
    assert from_tables(RUN, {}, "nothing") == RUN


def test_every_field_is_a_key_but_those_that_follow_from_others():
    def leaves(tables, path=()):
        for name, value in tables.items():
            yield from leaves(value, (*path, name)) if isinstance(value, dict) else [".".join((*path, name))]

    optional = {
        "checkpoint",
        "trace",
        "log_dir",
        "json_lines",
        "early_stopping",
        "job.format.label_threshold",
    }
    policies = {"job.policy.eviction", "job.policy.precision"}
    assert {*leaves(tables_of(RUN))} == {*keys_of(RUN)} - optional - policies
    assert len(keys_of(RUN)) > 60 and {"job.seed", "window.depth", "job.sizes.dim"} < {*keys_of(RUN)}


def test_one_key_sets_the_fields_of_one_option(tmp_path):
    run = read(tmp_path, "[job]\nseed = 5\nmax_seq_len = 9")
    assert (run.job.seed, run.window.seed, run.job.max_seq_len, run.job.sizes.max_seq_len) == (5, 5, 9, 9)


def test_a_file_of_an_editor_that_begins_with_a_byte_order_mark(tmp_path):
    assert read(tmp_path, "\ufeffmode = 'dbp'").mode == "dbp"


@pytest.mark.parametrize("capacity", [300, "2GiB"])
def test_a_value_of_either_type(tmp_path, capacity):
    policy = TablePolicy(Eviction("lfu", capacity=capacity, every=3))
    run = replace(RUN, job=replace(RUN.job, policy=policy))
    assert read(tmp_path, to_toml(tables_of(run))).job.policy == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[job.sizes]\ndimm = 3", "unknown key job.sizes.dimm; did you mean job.sizes.dim?"),
        ("dim = 3", "unknown key dim; did you mean job.sizes.dim?"),
        ("[job]\nnegatives = 3", "unknown key job.negatives; did you mean job.num_negatives?"),
        ("[window]\nseed = 3", "unknown key window.seed; did you mean job.seed?"),
        ("[windows]\ndepth = 3", "unknown key windows; did you mean "),
        ("qqq = 3", "unknown key qqq; did you mean "),
        ("[job.sizes]\nqk_dim = 3", "job.sizes.qk_dim cannot be set: it follows from dim and heads"),
        ("resume = true", "unknown key resume; did you mean "),
        ("[job]\nbatch_size = '3'", "job.batch_size takes a whole number, got '3'"),
        ("[job]\nbatch_size = 3.0", "job.batch_size takes a whole number, got 3.0"),
        ("[job]\nbatch_size = true", "job.batch_size takes a whole number, got True"),
        ("[job]\nbatch_size = 0", "job.batch_size takes a whole number from 1 to 16777216, got 0"),
        ("[job]\nlr = 'fast'", "job.lr takes a number, got 'fast'"),
        ("[job]\nlr = nan", "job.lr takes a number from 0 to 1000000.0, got nan"),
        ("[job]\nbalance = 1", "job.balance takes true or false, got 1"),
        ("[job]\nbottom = 3", "job.bottom takes a list, got 3"),
        ("[job]\nbottom = [3, 'x']", "job.bottom takes a whole number, got 'x'"),
        ("[job.sizes]\nrecompute = [3]", "job.sizes.recompute takes a text, got 3"),
        ("mode = 'nestpip'", "got 'nestpip'; did you mean nestpipe?"),
        ("mode = []", "mode takes one of reference, sequential, dbp, fwp, nestpipe, got []"),
        ("job = 3", "job is a table, got 3"),
        ("[job.policy]\neviction = 'lru:3'", "job.policy.eviction is a table, got 'lru:3'"),
        ("[job.policy.eviction]\nsize = 3", "unknown key job.policy.eviction.size; did you mean "),
        ("[job.policy.eviction]\nevery = 3", "job.policy.eviction: missing 1 required positional argument"),
        ("[job.policy.eviction]\npolicy = 'lru'", "needs capacity"),
        ("[job.policy.eviction]\npolicy = 'lru'\ncapacity = '2GB'", "capacity must be bytes, or such as"),
        ("[job.policy.eviction]\npolicy = 'lru'\ncapacity = 2.5", "capacity takes a whole number, got 2.5"),
        ("[early_stopping]\nmetric = 'AUC'\npatience = 0", "patience must be at least 1"),
        ("checkpoint = 3", "checkpoint takes a path, got 3"),
        ("mode = ", "is no TOML file"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path, text, message):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and str(tmp_path / "run.toml") in str(caught.value)


def test_numbers_out_of_bounds_are_named_before_torch_is_loaded(tmp_path, monkeypatch):
    """In the words of the reader of the file, for all keys that are numbers."""
    monkeypatch.setattr(cli, "load", lambda name: pytest.fail(f"{name} was loaded"))
    train = json.loads(declared.FILE.read_text())["train"]
    options = {each["name"]: each for each in train["options"]}
    bounds = {key: options[name]["shown"].get("min") for key, name in train["keys"].items()}
    wrong = {key: "nan" if least == 0 else least - 1 for key, least in bounds.items() if least is not None}
    assert wrong["steps"] == "nan" and wrong["job.batch_size"] == 0 and len(wrong) > 30
    for key, value in [*wrong.items(), ("steps", -5), ("window.micro_batches", 65_537)]:
        whole = options[train["keys"][key]]["kind"] == "int"
        text = f"{key} = {-1 if value == 'nan' and whole else value}"
        with pytest.raises(ValueError) as said:
            read(tmp_path, text)
        result = commands.invoke("train", "--config", tmp_path / "run.toml")
        assert result[0] == 2 and plain(str(said.value)) in plain(result[1]), result


def plain(text):
    """Without frames and line ends."""
    return "".join(text.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--lr", "--max-grad-norm", "--label-threshold"])
def test_no_number_is_none(option, monkeypatch):
    monkeypatch.setattr(cli, "load", lambda name: pytest.fail(f"{name} was loaded"))
    code, output, _ = commands.invoke("train", option, "nan")
    assert code == 2 and option in output


def test_options_win_over_the_file_also_with_the_default_value(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(tables_of(replace(OTHER, job=replace(OTHER.job, model="hstu")))))
    options = ["--config", file, "--lr", 0.003, "--no-clustering", "--merge", "--evict", "", "--steps", 4]
    result = commands.CliRunner().invoke(
        commands.app, ["train", "--data", commands.SMALL, *map(str, options), "--print-config"]
    )
    assert result.exit_code == 2 and "--early-stopping goes with --evaluate-every" in result.output
    result = commands.CliRunner().invoke(
        commands.app,
        ["train", "--data", commands.SMALL, *map(str, options), "--early-stopping", "", "--print-config"],
    )
    assert result.exit_code == 0, result.output
    run = from_tables(RUN, tomllib.loads(result.output), "output")
    expected = replace(
        OTHER, steps=4, early_stopping=None,
        job=replace(
            OTHER.job, model="hstu", data=commands.SMALL, lr=0.003, merge=True,
            policy=replace(OTHER.job.policy, eviction=None),
        ),
        window=replace(OTHER.window, clustering=False),
    )  # fmt: skip
    assert tables_of(run) == tables_of(expected)


def test_slipstream_gets_the_seed_of_the_file(tmp_path, monkeypatch):
    from tritonrec.harness.slipstream import run as slipstream_run

    seeds = []

    def compare(communicators, run, comparison):
        seeds.extend([run.job.seed, comparison.config.seed])
        raise ValueError("seen")

    monkeypatch.setattr(slipstream_run, "train_slipstream", compare)
    (tmp_path / "run.toml").write_text("[job]\nseed = 7")
    click = ["--model", "dlrm", "--data", "criteo:samples=300,scale=0.001", "--slipstream"]
    assert commands.invoke("train", "--config", tmp_path / "run.toml", *click)[:2] == (2, "error: seen")
    assert seeds == [7, 7]


def test_a_wrong_file_is_one_line_and_status_2(tmp_path):
    (tmp_path / "run.toml").write_text("[job.sizes]\ndimm = 3")
    code, output, error = commands.invoke("train", "--config", tmp_path / "run.toml")
    assert code == 2 and isinstance(error, SystemExit)
    assert output == f"error: {tmp_path}/run.toml: unknown key job.sizes.dimm; did you mean job.sizes.dim?"
    code, output, error = commands.invoke("train", "--config", tmp_path / "none.toml")
    assert code == 2 and isinstance(error, SystemExit) and "none.toml" in output


def test_the_metadata_of_a_checkpoint_makes_the_run(job, tmp_path):
    sizes = replace(job.sizes, qk_dim=6, v_dim=6, dim=12, heads=2)
    run = Run(
        replace(job, sizes=sizes), "reference", WindowConfig(1, max_grad_norm=math.inf), steps=2,
        checkpoint=tmp_path,
    )  # fmt: skip
    digest = train(Communicators.local(), run, quiet=True)["digest"]
    saved = read_config(tmp_path, replace(RUN, job=replace(RUN.job, sizes=sizes)))
    assert saved == run
    again = replace(saved, checkpoint=None)
    assert train(Communicators.local(), again, quiet=True)["digest"] == digest


def test_a_directory_without_settings_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_config(tmp_path, RUN)
    checkpoint.save(tmp_path, 1, {}, {}, {"seed": 5})
    with pytest.raises(ValueError, match="has no settings of tritonrec train"):
        read_config(tmp_path, RUN)


@pytest.mark.parametrize("command", [("plan",), ("train", "--config")])
def test_a_config_file_that_is_not_there_is_named_first(tmp_path, command):
    code, output, _error = commands.invoke(*command, tmp_path / "nope.toml")
    assert code == 2 and f"error: {tmp_path}/nope.toml: No such file" in output
