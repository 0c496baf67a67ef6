"""Promise: the thinned contract table leaves no three conditions together untried."""

import functools
import math
from dataclasses import replace
from itertools import combinations, product
from typing import get_args

import pytest

from tritonrec.embedding import OptimizerName
from tritonrec.harness.job import Job
from tritonrec.harness.verify.cases import (
    CONSISTENCIES,
    HOSTILE,
    MICRO_BATCHES,
    OPTIMIZERS,
    WORLD_SIZES,
    Case,
    contract_table,
)
from tritonrec.harness.verify.variants import CPU_BITS, EACH, every_variant
from tritonrec.pipeline import PIPELINED

pytestmark = pytest.mark.smoke
tables = functools.cache(contract_table)
"""Of one size as often as it is asked for; a table takes a second or two to choose."""


def values(case):
    return (
        case.mode, case.consistency, case.world_size, case.micro_batches, case.clustering, case.optimizer
    )  # fmt: skip


def triples(cases):
    return {triple for case in cases for triple in combinations(enumerate(values(case)), 3)}


def test_full_is_the_whole_product():
    full = [c for c in tables("full") if not c.data and not c.variant and c.mesh[1:] == (1, 1)]
    full = [c for c in full if c.storage == "host"]
    sizes = (PIPELINED, CONSISTENCIES, WORLD_SIZES, MICRO_BATCHES, (False, True), OPTIMIZERS)
    assert len(full) == len(set(full)) == math.prod(map(len, sizes)) == 540


def test_default_covers_every_triple_and_the_longest_case():
    default = tables("default")
    assert triples(default) == triples(tables("full"))
    longest = Case("nestpipe", "batch", 4, 8, True, "adam", steps=30)
    assert longest in default
    own = {(c.mode, c.world_size, c.micro_batches) for c in default if c.variant == EACH}
    assert own == set(product(PIPELINED, WORLD_SIZES[1:], MICRO_BATCHES))  # as in NestPipe
    assert len([case for case in default if not case.variant]) < 96


def test_quick_covers_every_value_and_every_mode_at_both_levels():
    quick = contract_table("quick", world_sizes=[1, 2])
    quick = [case for case in quick if case.replicas == 1 and not case.changes.own_loop]
    assert {(c.mode, c.consistency) for c in quick} == {(m, c) for m in PIPELINED for c in CONSISTENCIES}
    assert {c.micro_batches for c in quick} == set(MICRO_BATCHES)
    assert {c.optimizer for c in quick} == set(OPTIMIZERS)
    assert any(c.delay_seed is not None for c in quick)


def test_every_rule_is_tried_in_the_nested_pipeline_and_decays():
    tried = {(c.mode, c.world_size, c.micro_batches, c.optimizer) for c in tables("default") if c.variant}
    new = set(get_args(OptimizerName)) - set(OPTIMIZERS)
    assert {("nestpipe", 2, 4, rule) for rule in new} <= tried
    assert not any(case.optimizer in new for case in tables("quick"))


@pytest.mark.parametrize(("size", "modes"), [("quick", PIPELINED[-1:]), ("default", PIPELINED)])
def test_the_hostile_log_is_tried_in_every_mode_on_few_and_on_many_ranks(size, modes):
    cases = [case for case in tables(size) if case.data == HOSTILE and not case.variant]
    ranks = min(WORLD_SIZES), max(WORLD_SIZES)
    tried = {(case.mode, case.consistency, case.world_size) for case in cases}
    assert tried == {*product(modes, CONSISTENCIES, ranks)}


@pytest.mark.parametrize("size", ["default", "full"])
def test_every_variant_and_every_change_of_the_world_size_is_tried(size):
    cases = tables(size)
    assert {case.variant for case in cases} == {"", *every_variant()} - {CPU_BITS}
    pairs = {(case.world_size, case.restart) for case in cases if case.restart}
    assert pairs == {(before, after) for before in range(1, 5) for after in range(1, 5)}


@pytest.mark.parametrize("size", ["quick", "default", "full"])
@pytest.mark.parametrize("counts", [[1], [1, 4], [2]])
@pytest.mark.parametrize("ranks", [[1], [1, 4]])
def test_a_variant_is_tried_only_where_it_does_something(size, counts, ranks):
    """Else it would fail as a case that proves nothing, in a table that was asked for."""
    cases = contract_table(size, world_sizes=ranks, micro_batches=counts)
    early = [case for case in cases if case.variant == "early-dense"]
    assert all(case.world_size >= 2 and case.micro_batches >= 2 for case in early)
    assert bool(early) == (ranks[-1] > 1 and counts[-1] > 1)
    everything = {case.variant for case in tables(size)}
    assert everything - {case.variant for case in cases} >= ({"early-dense"} if not early else set())


def test_tables_elsewhere_are_tried_in_every_mode_with_all_policies_and_across_a_restart():
    for storage in ("device", "cached", "disk", "cached-disk"):
        cases = [case for case in tables("default") if case.storage == storage]
        assert {case.mode for case in cases} - {"sequential"} == set(PIPELINED)
        assert {case.variant for case in cases} >= {"", "scale", "policies", "first-use", "restart"}
        assert all(case.resumed().storage != storage for case in cases)
    restarted = {
        (case.mode, case.variant)
        for case in tables("default")
        if case.storage in ("disk", "cached-disk") and case.restart != case.world_size
    }
    policies = ("lru", "lfu", "ttl", "admission", "precision-tiers", "policies", "merged")
    assert restarted >= {*product(("sequential", *PIPELINED), policies)}
    quick = {(case.storage, case.variant) for case in tables("quick")}
    assert quick >= {(each, "scale") for each in ("device", "cached", "disk", "cached-disk")}


@pytest.mark.parametrize("storage", ["device", "cached", "disk", "cached-disk"])
def test_the_reference_of_a_table_elsewhere_is_one_on_the_host(storage):
    case, job = Case("nestpipe", "batch", 2, 4, True, "adam", 6, storage=storage), Job()
    placement = case.job(job).placement
    assert placement.storage == storage.removesuffix("-disk")
    assert bool(placement.path) == storage.endswith("disk")
    assert case.reference(job) == replace(case, storage="host").reference(job)
    assert case.reference(job).job.placement.storage == "host"


@pytest.mark.parametrize(
    ("storage", "after"), [("auto", "auto"), ("host", "host"), ("device", "cached"), ("cached", "device")]
)
def test_after_a_restart_tables_of_a_device_are_in_another_place_there(storage, after):
    case = Case("nestpipe", "batch", 2, 4, True, "adam", 6, restart=1, storage=storage)
    assert case.resumed() == replace(case, storage=after)


@pytest.mark.parametrize("size", ["default", "full"])
def test_every_grouping_of_four_and_eight_ranks_is_tried_with_and_without_pipeline(size):
    cases = [case for case in tables(size) if case.replicas > 1 and not case.variant]
    meshes = {(4, 2), (4, 4), (8, 2), (8, 4), (8, 8)}
    for mode in ("nestpipe", "sequential"):
        assert {(c.world_size, c.replicas) for c in cases if c.mode == mode} == meshes
    assert {(c.variant, c.restart) for c in tables(size) if c.replicas > 1} >= {
        ("scale", 0),
        ("restart", 1),
    }
    assert not any(case.replicas > 1 for case in contract_table("quick", world_sizes=[1]))


def test_lookups_over_nodes_are_tried_with_and_without_pipeline_and_in_every_form():
    cases = [case for case in tables("default") if case.nodes > 1]
    for mode in ("nestpipe", "sequential"):
        plain = {(c.world_size, c.nodes) for c in cases if c.mode == mode and not c.variant}
        assert plain == {(4, 2), (4, 4), (8, 2), (8, 4)}
    assert {c.variant for c in cases} >= {"scale", "dedup-exchange", "packed-sums", "exchange-bf16", EACH}
    assert {c.storage for c in cases} == {"host", "device", "cached"} and {c.restart for c in cases} == {0, 1}
    assert all("node_bytes" in c.shows for c in cases if c.nodes < c.world_size)
    assert not any(case.nodes > 1 for case in contract_table("default", world_sizes=[1, 2, 3]))


def test_a_case_that_accumulates_ends_with_a_whole_update():
    for steps, expected in ((1, 3), (6, 6), (8, 9)):
        assert Case("dbp", "batch", 2, 3, False, "adam", steps, variant="accumulate").steps == expected
    assert Case("dbp", "batch", 2, 3, False, "adam", 8, variant="lru").steps == 8


def test_equal_references_have_one_file_and_different_ones_have_their_own():
    job = Job()
    case = Case("dbp", "batch", 2, 3, False, "adam", 6)
    assert replace(case, variant="dedup-none", mode="fwp").reference(job) == case.reference(job)
    others = [
        replace(case, variant="lru"),
        replace(case, variant="accumulate"),
        replace(case, optimizer="sgd"),
    ]
    files = {each.reference(job).file_name for each in [case, *others]}
    assert len(files) == 4


def test_the_choice_is_the_same_every_time():
    assert contract_table() == contract_table()


def test_an_unknown_size_is_refused():
    with pytest.raises(ValueError, match="quick, default or full"):
        contract_table("tiny")


def test_simpler_cases_are_simpler():
    case = Case("dbp", "batch", 4, 8, True, "adam", 6, delay_seed=3)
    simpler = list(case.simpler())
    assert len(simpler) == len(set(simpler)) and case not in simpler
    changed = {name for each in simpler for name, value in vars(each).items() if value != vars(case)[name]}
    assert changed == {"world_size", "micro_batches", "clustering", "optimizer", "delay_seed"}
    assert list(Case("dbp", "batch", 1, 1, False, "sgd", 6).simpler()) == []
