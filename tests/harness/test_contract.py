"""Promise: modes are bit-identical to their reference, injected faults are not, and the report says so."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from speeds import slow_except

from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.contract import Verifier
from tritonrec.harness.verify.report import CaseResult, Report
from tritonrec.harness.verify.state import Difference
from tritonrec.harness.verify.thread_ranks import ThreadPool
from tritonrec.harness.verify.tools import FAULTS, SELECTIONS
from tritonrec.harness.verify.variants import Variant

pytestmark = pytest.mark.multi_rank

CASES = [
    Case("nestpipe", "batch", 4, 8, True, "adam", 8),
    Case("nestpipe", "batch", 2, 3, False, "rowwise_adagrad", 5, delay_seed=1),
    Case("nestpipe", "window", 2, 4, True, "adam", 5, delay_seed=2),
    Case("dbp", "batch", 4, 2, False, "sgd", 5, delay_seed=3),
    Case("dbp", "window", 1, 3, True, "rowwise_adagrad", 5),
    Case("fwp", "batch", 2, 4, True, "adam", 5, delay_seed=4),
    Case("fwp", "window", 4, 8, False, "adam", 5),
    # more micro-batches than a rank has samples: the empty ones are legal
    Case("nestpipe", "batch", 4, 20, False, "adam", 4),
    # rows that catch up with decay at their next update, wherever and whenever it is
    Case("nestpipe", "batch", 2, 4, True, "rowwise_adam", 6, variant="lazy-decay"),
    Case("dbp", "batch", 2, 3, True, "adam", 8, variant="lazy-decay", storage="cached", restart=1),
    Case("fwp", "batch", 1, 4, True, "adamw", 8, variant="lazy-decay", restart=2),
    Case("nestpipe", "batch", 2, 4, False, "momentum_sgd", 6, variant="weight-decay", storage="device"),
    *(
        Case("nestpipe", "batch", 2, 4, True, "adam", 8, 1, variant=name)
        for name in ("bf16", "fp16", "mixed")
    ),
    Case("dbp", "window", 2, 3, True, "adam", 6, variant="fp16"),
    Case("fwp", "batch", 4, 2, True, "adam", 8, variant="fp16", restart=1),
    Case("dbp", "batch", 4, 3, True, "sgd", 6, variant="mixed", storage="cached", replicas=2, restart=1),
    Case("nestpipe", "batch", 4, 3, True, "sgd", 6, variant="exchange-bf16", storage="device"),
    Case("fwp", "batch", 2, 3, True, "adam", 5, variant="exchange-bf16", replicas=2),
    # exact sums whole, to owners and to replicas, and packed where others send them whole
    Case("nestpipe", "batch", 4, 3, True, "adam", 5, delay_seed=3, variant="whole-sums", replicas=2),
    Case("nestpipe", "batch", 2, 3, True, "sgd", 4, variant="packed-sums", storage="device"),
    # uneven shards: some ranks have no row of a parameter
    Case("nestpipe", "batch", 4, 3, False, "adam", 5, delay_seed=5, variant="fsdp"),
    Case("dbp", "window", 2, 2, True, "adagrad", 5, variant="fsdp"),
    Case("nestpipe", "batch", 2, 3, False, "adam", 4, variant="checkpoint"),
    # bags with weights, which go with their samples
    Case("nestpipe", "batch", 2, 3, True, "adam", 5, delay_seed=5, variant="weighted-bags"),
    Case("fwp", "batch", 1, 5, False, "rowwise_adagrad", 5, variant="weighted-bags"),
    Case("dbp", "window", 2, 2, True, "sgd", 5, variant="weighted-bags"),
    # the models as published, and predictions served with every bound of the lag, on uneven blocks of samples
    Case("nestpipe", "batch", 2, 3, True, "adam", 4, 1, variant="fuxi-rms"),
    Case("dbp", "window", 4, 3, False, "sgd", 4, variant="grm-product"),
    Case("nestpipe", "batch", 2, 3, True, "adam", 3, 1, variant="bounded-lag"),
    Case("fwp", "batch", 4, 3, True, "sgd", 3, variant="bounded-lag"),
    # two versions served with cached keys and values
    Case("nestpipe", "batch", 2, 3, True, "adam", 8, 1, variant="cached"),
    Case("fwp", "batch", 1, 2, False, "adagrad", 8, variant="cached-sasrec"),
    # a replica follows
    Case("nestpipe", "batch", 2, 3, True, "adam", 8, 1, variant="deltas"),
    # a server of two versions, asked by all at one time
    Case("fwp", "batch", 2, 3, True, "adam", 4, 1, variant="served"),
    # a rank dies, and the others go on
    Case("nestpipe", "batch", 2, 3, True, "adam", 6, delay_seed=1, variant="lost-rank"),
    Case("dbp", "batch", 3, 2, False, "sgd", 7, variant="lost-rank", storage="cached"),
    Case("nestpipe", "batch", 2, 3, True, "adam", 8, 1, variant="policies", storage="cached-disk", restart=1),
    # what a user writes: a model of torch's modules, and a loop without a trainer, in which ranks stay empty
    Case("nestpipe", "batch", 2, 3, True, "adam", 4, delay_seed=5, variant="converted"),
    Case("fwp", "window", 1, 4, False, "sgd", 4, variant="converted"),
    Case("sequential", "batch", 1, 3, False, "adam", 5, variant="hash-embedding"),
    Case("sequential", "batch", 4, 20, False, "rowwise_adagrad", 6, variant="hash-embedding"),
]
# each mode, both consistencies, on one and two ranks; a rank that dies; both of what a user writes
QUICK = [CASES[1], CASES[4], CASES[5], CASES[-7], CASES[-5], CASES[-4], CASES[-2]]
QUICK_FAULTS = (
    "read-before-write-back", "missed-decay-forgotten", "page-reused-early", "cached-position-off-by-one",
    "delta-applied-twice", "answer-of-another-request", "disk-lost-write-back",
)  # fmt: skip
OF_PROCESSES = ("parameters-of-the-last-window", "dense-sums-over-the-wrong-group")
OF_TRAINING = [
    pytest.param(fault, id=fault.name, marks=[] if fault in FAULTS else pytest.mark.if_changed)
    for fault in SELECTIONS[True, True]
    if fault.case.changes.tool is Variant.tool and fault.name not in OF_PROCESSES
]


@pytest.fixture(scope="module")
def threads(job):
    """A verifier whose ranks are threads."""
    with Verifier(job, ThreadPool()) as verifier:
        yield verifier


@pytest.mark.smoke
@pytest.mark.parametrize("case", slow_except(QUICK, CASES), ids=str)
def test_a_mode_is_bit_identical_to_its_reference(verifier, case):
    result = verifier.run(case)
    assert result.identical, result.error or result.first_difference
    assert result.tensors_compared >= 3 * case.steps * case.world_size
    assert result.bytes_compared > 0


@pytest.mark.smoke
@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_an_injected_fault_is_caught_by_the_bits(verifier, name):
    """Some; `tritonrec verify --inject-faults` has all."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    result = verifier.run_fault(fault)
    assert result.caught, result.evidence
    assert ("error" if fault.says else "bits") in result.by
    assert fault.says in result.evidence
    if fault.injection.schedule is not None:
        assert "check" in result.by


@pytest.mark.every_case
@pytest.mark.parametrize("fault", OF_TRAINING)
def test_an_injected_fault_still_does_what_it_is_for(threads, fault):
    """One that calls what was renamed, or takes other arguments now, ends in an error of another kind."""
    late = fault.case.variant == "restart"
    steps = fault.case.steps if late else 3
    found = threads.run(replace(fault.case, steps=steps), fault.name)
    if fault.says:
        assert found.error is not None and fault.says in found.error
    else:  # of few steps some evict nothing yet
        assert found.first_difference or (found.error or "").startswith("the case proves nothing"), found


FAULT_SEEN = Difference(1, "loss", [7], 0.5, 0.25, None)


def test_faults_of_one_case_share_its_run_without_a_fault(job):
    faults = [fault for fault in FAULTS if fault.case == FAULTS[0].case][:3]
    with Verifier(job, SimpleNamespace(meshes=())) as verifier:
        ran = []
        verifier.run = lambda case, fault=None: (
            ran.append((case, fault)) or CaseResult(case, not fault, FAULT_SEEN if fault else None)
        )
        assert all(verifier.run_fault(fault).caught for fault in faults)
        assert ran == [(FAULTS[0].case, name) for name in (None, *(fault.name for fault in faults))]


@pytest.mark.slow
def test_a_failure_is_shrunk_to_the_smallest_case(verifier):
    lost = next(fault for fault in FAULTS if fault.name == "lost-micro-batch-gradient")
    failed = verifier.run(replace(lost.case, world_size=4, micro_batches=4), lost.name)
    assert not failed.identical
    run = verifier.run
    verifier.run = lambda case, fault=None: run(case, lost.name)
    try:
        smallest = verifier.shrink(failed)
    finally:
        del verifier.run
    assert smallest.case.world_size == 1 and smallest.case.micro_batches == 1
    assert smallest.case.steps == 1 and smallest.first_difference is not None


def test_shrinking_keeps_to_the_world_sizes_asked_for(job):
    failed = CaseResult(
        Case("nestpipe", "batch", 3, 1, False, "sgd", 1), identical=False, error="a rank died"
    )
    with Verifier(job, SimpleNamespace(meshes=((3, 1, 1),))) as verifier:
        verifier.run = lambda case, fault=None: pytest.fail(f"{case} cannot run here")
        assert verifier.shrink(failed) is failed


def test_the_report_has_the_documented_shape(verifier, job, tmp_path):
    report = Report(job)
    report.cases.append(verifier.run(CASES[1]))
    (fault,) = (each for each in FAULTS if each.name == "no-copy-of-kept-rows")
    report.faults.append(verifier.run_fault(fault))
    file = tmp_path / "deep" / "report.json"
    report.save(file)
    document = json.loads(file.read_text())
    assert set(document) == {"environment", "cases", "faults"}
    (case,) = document["cases"]
    assert {
        "mode", "consistency", "world_size", "micro_batches", "steps", "data", "identical",
        "tensors_compared", "bytes_compared", "first_difference", "seconds",
    } <= set(case)  # fmt: skip
    assert case["identical"] is True and case["first_difference"] is None
    (fault,) = document["faults"]
    assert fault["name"] == "no-copy-of-kept-rows" and fault["caught"] is True
