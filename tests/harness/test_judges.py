"""Promise: what verify says of a case, a fault and a report follows from all that its ranks found."""

from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from threading import Barrier, Event
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tritonrec.distributed import Communicators, RankDiedError
from tritonrec.harness.verify import contract, run_case
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.contract import Verifier
from tritonrec.harness.verify.faults import Injection
from tritonrec.harness.verify.references import References
from tritonrec.harness.verify.report import CaseResult, FaultResult, Report, print_report
from tritonrec.harness.verify.run_case import RankReport, record_reference, require_compared
from tritonrec.harness.verify.state import Comparison, Difference
from tritonrec.harness.verify.tools import FAULTS, SELECTIONS, lost, served
from tritonrec.harness.verify.tools.exported import exported_parts
from tritonrec.serving import Predictor, server
from tritonrec.serving.bounded_lag import BoundedLagAllToAll

pytestmark = [pytest.mark.every_case, pytest.mark.if_changed]

WINDOW = Case("nestpipe", "window", 2, 3, False, "adam", 6)
BATCH = replace(WINDOW, consistency="batch")


def at(step, tensor="loss"):
    return Difference(step, tensor, [0], 0.0, 1.0, None)


def found(first=None, tensors=10, nbytes=100, seconds=1.0, **counts):
    return RankReport(first, tensors, nbytes, seconds, counts)


class Pool:
    """Ranks whose reports, or error, are given, call by call."""

    meshes = ((1, 1, 1), (2, 1, 1))

    def __init__(self, *calls):
        self.calls, self.asked, self.restarted = [*calls], [], 0

    def run(self, function, world_size, *args, replicas=1, nodes=1):
        self.asked.append((world_size, *args))
        call = self.calls.pop(0)
        if isinstance(call, Exception):
            raise call
        return call

    def restart(self):
        self.restarted += 1


def judged(case, *calls, fault=None):
    """What a verifier says of `case` where its ranks report `calls`."""
    pool = Pool(*calls)
    with Verifier(SimpleNamespace(), pool) as verifier:
        verifier.record = lambda cases: None
        return verifier.run(case, fault), pool


# --- a case


@pytest.mark.parametrize("differing", [0, 1])
def test_a_difference_of_any_rank_is_the_cases(differing):
    ranks = [found(), found()]
    ranks[differing] = found(at(3, "table item"))
    result, _ = judged(WINDOW, ranks)
    assert not result.identical and result.first_difference == at(3, "table item") and result.error is None


def test_the_earliest_of_the_ranks_differences_is_named():
    result, _ = judged(WINDOW, [found(at(4)), found(at(2, "weight")), found(at(2, "table item"))])
    assert result.first_difference == at(2, "weight")


def test_figures_of_a_case_are_those_of_all_ranks():
    result, _ = judged(WINDOW, [found(None, 3, 50, 2.0, read=4, kept=1), found(None, 4, 7, 1.0, read=5)])
    assert result.identical
    assert (result.tensors_compared, result.bytes_compared, result.seconds) == (7, 57, 2.0)
    assert result.counts == {"read": 9, "kept": 1}


def test_a_case_whose_variant_did_nothing_has_failed_and_says_what_was_idle():
    case = replace(WINDOW, variant="policies")  # shows evicted, rejected and promoted
    shown = {"evicted": 1, "rejected": 2, "promoted": 3}
    assert judged(case, [found(**shown), found()])[0].identical
    assert judged(case, [found(), found(**shown)])[0].identical
    for name in shown:
        result, _ = judged(case, [found(**{**shown, name: 0}), found()])
        assert not result.identical and result.error == f"the case proves nothing of policies: {name} is zero"


def test_a_rank_that_died_is_a_failed_case_and_a_new_pool():
    result, pool = judged(WINDOW, RankDiedError("rank 1: KeyError: 'x'"))
    assert not result.identical and result.error == "rank 1: KeyError: 'x'" and pool.restarted == 1


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_of_a_restart_are_judged(half):
    halves = [[found(), found()], [found()]]
    halves[half][0] = found(at(1))
    case = replace(WINDOW, restart=1)
    result, pool = judged(case, *halves)
    assert result.first_difference == at(1)
    (_, _, _, _, _, before), (_, _, resumed, _, _, after) = pool.asked
    assert (before.first, before.last, after.first, after.last) == (0, 3, 3, 6)
    assert before.save == after.load and resumed == case.resumed()


@pytest.mark.parametrize(
    ("case", "fault", "asked"), [(BATCH, None, True), (WINDOW, None, False), (BATCH, "float-sums", False)]
)
def test_the_reference_is_doubted_where_a_clean_case_differs(monkeypatch, case, fault, asked):
    monkeypatch.setattr(References, "doubt", lambda *_: "the reference differs from itself")
    monkeypatch.setattr(Case, "reference", lambda *_: None)
    assert judged(case, [found(at(0))], fault=fault)[0].error == (
        "the reference differs from itself" * asked or None
    )
    assert judged(case, [found()], fault=fault)[0].error is None


def test_references_are_recorded_for_the_longest_case_and_doubts_end_with_them(job, monkeypatch):
    recorded = []
    monkeypatch.setattr(
        "tritonrec.harness.verify.references.record_reference",
        lambda reference, steps, folder: recorded.append(steps),
    )
    references, short = References(), replace(BATCH, steps=2)
    references.record(job, [BATCH, short])
    references.record(job, [short])
    assert recorded == [6]
    references._doubts[BATCH.reference(job)] = "other bits"
    references.record(job, [BATCH])
    assert references.doubt(BATCH.reference(job)) == "other bits"
    references.record(job, [replace(BATCH, steps=7)])
    assert recorded == [6, 7] and not references._doubts
    references.cleanup()


# --- what has to be compared


STEPS = range(2, 7)
TABLES = SimpleNamespace(table_names=["item", "genre"])
PARTS = ("dense", "table item", "table genre")
DUE = {(step, "loss") for step in STEPS} | {(step, part) for step in (2, 5, 6) for part in PARTS}
LATER = [*exported_parts(TABLES.table_names, 0), *served.PARTS]


def test_every_part_of_every_step_has_to_be_compared():
    """Updates of three batches: the steps 2 and 5 end one, and the last step is compared in any case."""
    due = {*DUE, *((6, name) for name in LATER)}
    assert {"export of item", "export of genre", "scores, exported"} < {*LATER} and len(served.PARTS) == 3
    assert exported_parts(TABLES.table_names, 1) == ["export of item", "export of genre"]
    for missing in (None, *sorted(due)):
        comparison = Comparison(TABLES, 0, 1, steps_seen=due - {missing})
        if missing is None:
            require_compared(WINDOW, comparison, STEPS, 3, LATER)
            continue
        with pytest.raises(RuntimeError) as raised:
            require_compared(WINDOW, comparison, STEPS, 3, LATER)
        assert f"never compared [{missing!r}]; a proof that was skipped has failed" in str(raised.value)
        comparison.differences[0, 0] = at(2)  # nothing is compared behind a difference
        require_compared(WINDOW, comparison, STEPS, 3, LATER)


PLAIN = Case("dbp", "batch", 1, 2, False, "sgd", 2)
OWN = replace(PLAIN, mode="sequential", variant="hash-embedding")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Records the reference of a case, once; the folder."""
    folder = str(tmp_path_factory.mktemp("references"))
    there = set()

    def record(job, case):
        reference = case.reference(job)
        if (reference, case.steps) not in there:
            record_reference(reference, case.steps, folder)
            there.add((reference, case.steps))
        return folder

    return record


def run(recorded, job, case, tmp_path=None, injection=None, monkeypatch=None):
    """`run_case`, with its export if it has one, and with a fault."""
    if injection is not None:
        monkeypatch.setattr(run_case, "Injection", lambda: injection)
    stretch = run_case.Stretch(0, case.steps, folder=str(tmp_path))
    return run_case.run_case(Communicators.local(), job, case, recorded(job, case), stretch=stretch)


EXPORTED = ["compare_weights", "compare_part"]
OWED = {
    "export": ["export of item", "scores, exported"], "bounded-lag": served.PARTS,
    "cached": ["export of item", "scores, exported", "scores, cached"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "lost", "missing"),
    [
        (PLAIN, ["_loss"], ["loss"]),
        (PLAIN, ["_dense"], ["dense"]),
        (PLAIN, ["_table"], ["table item"]),
        (OWN, ["_table"], ["table item"]),
        (replace(PLAIN, variant="deltas"), EXPORTED, ["export of item", "scores, exported"]),
    ],
    ids=lambda value: value.variant or "trainer" if isinstance(value, Case) else None,
)
def test_a_case_that_compares_less_has_failed(recorded, job, tmp_path, monkeypatch, case, lost, missing):
    for name in lost:
        monkeypatch.setattr(Comparison, name, lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="never compared") as raised:
        run(recorded, job, case, tmp_path)
    assert all(f"(1, {part!r})" in str(raised.value) for part in missing)


@pytest.mark.parametrize("variant", ["export", "bounded-lag"])
def test_exports_and_predictions_served_with_every_bound_are_compared(
    recorded, job, tmp_path, monkeypatch, variant
):
    parts, bounds, compare = {}, [], Comparison.compare_part
    monkeypatch.setattr(
        Comparison, "compare_part", lambda *of: parts.update({of[2]: len(of[-1])}) or compare(*of)
    )
    lagging = Injection(tool=lambda *of: bounds.append(of[1]) or BoundedLagAllToAll(*of))
    case, lags = replace(PLAIN, variant=variant), variant == "bounded-lag"
    report = run(recorded, job, case, tmp_path, lagging if lags else Injection(), monkeypatch)
    assert report.first_difference is None and report.tensors_compared > 0
    assert [*parts] == (served.PARTS if lags else ["scores, exported"]) and all(parts.values())
    assert bounds == [0, 1, 3] * lags and report.counts.get("served", 0) == sum(parts.values()) * lags


@pytest.mark.parametrize(
    ("variant", "of", "name", "tensor"),
    [
        ("export", Predictor, "scores", "scores, exported"),
        ("export-grm", Predictor, "predict", "scores, exported"),
        ("cached", Predictor, "scores_of", "scores, cached"),
        ("bounded-lag", BoundedLagAllToAll, "start", "predictions, served with k = 0"),
    ],
)
def test_what_is_served_is_what_is_compared(recorded, job, tmp_path, monkeypatch, variant, of, name, tensor):
    """Not the trainer's own scores with themselves: other ones of the export, or other messages, differ; and
    a case owes what it serves, so that one that compares less has failed."""
    serve, due, judge = getattr(of, name), [], run_case.require_compared
    monkeypatch.setattr(run_case, "require_compared", lambda *given: due.extend(given[-1]) or judge(*given))
    changed = (
        (lambda self, values, send: serve(self, values + 1, send))
        if variant == "bounded-lag"
        else (lambda *given: serve(*given) + 1)
    )
    monkeypatch.setattr(of, name, changed)
    if variant == "cached":  # its export has the same scores, and is compared before
        compare = Comparison.compare_part
        monkeypatch.setattr(Comparison, "compare_part", lambda *of: "cached" in of[2] and compare(*of))
    first = run(recorded, job, replace(PLAIN, variant=variant), tmp_path).first_difference
    assert first is not None and (first.step, first.tensor) == (1, tensor)
    assert {*OWED.get(variant, [tensor])} <= {*due}


def test_requests_that_are_answered_alone_are_idle(recorded, job, tmp_path, monkeypatch):
    config = server.ServerConfig
    monkeypatch.setattr(server, "ServerConfig", lambda **given: config(batch=1, **given))
    report = run(recorded, job, replace(PLAIN, variant="served"), tmp_path)
    assert report.first_difference is None and report.counts["answered_together"] == 0


def one_row_more(tables):
    tables.groups[0].table.lookup(torch.tensor([12345]), 0)


@pytest.mark.parametrize(
    ("case", "step"), [(PLAIN, 1), (replace(PLAIN, variant="skip-fetch"), 1), (OWN, 0)], ids=str
)
def test_a_row_that_nobody_used_is_found_at_the_end(recorded, job, monkeypatch, case, step):
    """Its values are initial, as those of a later batch's row; at the end, and in a loop, there is none."""
    assert run(recorded, job, case).first_difference is None
    injection = Injection(
        program=lambda program: one_row_more(program.tables), loop=lambda loop: one_row_more(loop.rows.tables)
    )
    first = run(recorded, job, case, None, injection, monkeypatch).first_difference
    assert first is not None and (first.step, first.tensor, first.index) == (step, "table item", [12345])
    assert (first.expected, first.got) == ("absent", "present")


def test_what_a_rank_found_before_another_was_lost_counts(recorded, job, monkeypatch):
    case = replace(PLAIN, variant="lost-rank")
    arguments = Communicators.local(), job, case, recorded(job, case), None
    memory = lost.Memory(comparisons=[Comparison(TABLES, 0, 1, differences={(0, 0): at(0)})])
    assert lost.run_losing(*arguments, memory).first_difference == at(0)
    memory = lost.Memory(comparisons=[Comparison(TABLES, 0, 1)])
    assert lost.run_losing(*arguments, memory).first_difference is None
    monkeypatch.setattr(run_case, "compare_run", lambda *_: 0)
    with pytest.raises(RuntimeError, match="never compared"):
        lost.run_losing(*arguments, lost.Memory(comparisons=[Comparison(TABLES, 0, 1)]))


def test_updates_that_were_left_out_are_counted():
    one = torch.ones(1, dtype=torch.int64)
    results = [
        SimpleNamespace(step=step, sample_ids=one, losses=one.float(), skipped=step > 0) for step in range(3)
    ]
    config = SimpleNamespace(exchange=SimpleNamespace(skip_fetch=False))
    program = SimpleNamespace(after=lambda *_: None, config=config)
    trainer = SimpleNamespace(program=program, run=lambda batches: (results[step] for step in batches))
    comparison = SimpleNamespace(compare=lambda *_, **__: None)
    assert run_case.compare_run(trainer, [[0, 1], [2]], comparison, lambda step: {}, 2) == 2


class MadeError(Exception):
    """A trainer was made, and its arguments are known."""


def test_random_delays_differ_by_rank_and_reach_the_trainer(job, monkeypatch):
    def made(*arguments, **_):
        raise MadeError(arguments)

    monkeypatch.setattr(run_case, "Trainer", made)
    task = SimpleNamespace(stage="compute", micro_batch=0)
    seen = {}
    for seed in (None, 3):
        case = replace(PLAIN, delay_seed=seed)
        with pytest.raises(MadeError) as raised, run_case.prepared(Communicators.local(), job, case):
            pass
        seen[seed] = raised.value.args[0][7]
    assert seen[None] is None
    waits = [run_case._delays(case, rank)(task) for rank in (0, 0, 1)]
    assert seen[3](task) == waits[0] == waits[1] != waits[2] and 0 < max(waits) <= case.max_delay


@pytest.mark.parametrize("schedule", [None, lambda schedule: schedule])
def test_the_schedule_of_a_case_is_checked_unless_a_fault_changes_it(job, monkeypatch, schedule):
    def made(*_, checked, **__):
        raise MadeError(checked)

    monkeypatch.setattr(run_case, "Trainer", made)
    injected = Injection(schedule=schedule)
    with (
        pytest.raises(MadeError) as raised,
        run_case.prepared(Communicators.local(), job, PLAIN, injected=injected),
    ):
        pass
    assert raised.value.args[0] is (schedule is None)


@pytest.mark.parametrize("injected", [Injection(), Injection(alone=True)])
def test_a_clean_case_runs_under_the_guard(job, injected):
    with run_case.prepared(Communicators.local(), job, PLAIN, injected=injected) as (trainer, _):
        assert trainer.guard.active is (injected == Injection())


# --- a fault


BITS = next(fault for fault in FAULTS if fault.name == "float-sums")
SAYS = next(fault for fault in FAULTS if fault.name == "bit-of-a-row-at-rest")
EDGE = next(fault for fault in FAULTS if fault.name == "copy-before-update")
NAMED = f"rank 1: StageFailedError: the row of id 24 of table item {SAYS.says}"
ACCIDENT = "rank 0: StageFailedError: stage dense_reduce(0) failed: KeyError: Routes"


@pytest.mark.parametrize(
    ("fault", "differs", "error", "caught", "by"),
    [
        (BITS, True, None, True, ["bits"]),
        (BITS, False, None, False, []),
        (BITS, False, ACCIDENT, False, ["error"]),
        (SAYS, False, NAMED, True, ["error"]),
        (SAYS, False, ACCIDENT, False, ["error"]),
        (SAYS, True, None, False, ["bits"]),
        (SAYS, False, None, False, []),
        (EDGE, True, None, True, ["check", "bits"]),
        (EDGE, False, None, False, ["check"]),
        (EDGE, False, ACCIDENT, False, ["check", "error"]),
    ],
)
def test_a_fault_is_caught_as_it_declares_and_by_nothing_else(fault, differs, error, caught, by):
    with Verifier(SimpleNamespace(), Pool()) as verifier:
        verifier.run = lambda case, name=None: CaseResult(
            case, not name, at(3, "table item") if name and differs else None, error=error if name else None
        )
        result = verifier.run_fault(fault)
    assert (result.caught, result.by) == (caught, by)
    assert result.where == ("step 3, table item" if differs else "")
    assert caught or "must end in" in result.evidence
    assert error is None or error in result.evidence


@pytest.mark.parametrize("clean", [at(1), None])
def test_a_fault_proves_nothing_where_its_case_fails_without_it(clean):
    with Verifier(SimpleNamespace(), Pool()) as verifier:
        verifier.run = lambda case, name=None: CaseResult(
            case, False, at(2) if name else clean, error=None if clean else "x"
        )
        result = verifier.run_fault(BITS)
    assert not result.caught and "the clean case is not identical" in result.evidence


def test_faults_of_other_cases_have_clean_runs_of_their_own():
    other = replace(BITS, case=replace(BITS.case, micro_batches=5))
    with Verifier(SimpleNamespace(), Pool()) as verifier:
        verifier.run = lambda case, name=None: CaseResult(
            case, case == BITS.case and not name, at(2) if name else None
        )
        assert verifier.run_fault(BITS).caught
        assert not verifier.run_fault(other).caught


def test_every_fault_that_ends_in_an_error_says_so():
    """Those that end in bits are run by `test_contract.py` and `test_corpus.py`."""
    says = {fault.name for fault in SELECTIONS[True, True] if fault.says}
    assert says == {
        "bit-of-a-row-at-rest", "bit-of-a-message", "bit-of-a-message-between-nodes", "bit-of-a-gradient",
        "no-keys-crash", "disk-torn-write-at-rest", "delta-of-another-run",
        "new-rows-are-not-initialised", "shard-read-by-two-ranks", "window-read-by-two-ranks",
        "dense-sums-over-the-wrong-group", "one-parameter-not-exchanged", "ranks-begin-with-other-parameters",
        "a-copy-updated-by-another-rule", "step-counted-for-each-parameter", "dropout-drawn-again",
    }  # fmt: skip
    assert all(len(fault.says) > 12 for fault in SELECTIONS[True, True] if fault.says)


# --- a smaller case


def test_a_smaller_case_has_to_fail_too():
    failed = CaseResult(replace(WINDOW, micro_batches=4), False, at(5))
    with Verifier(SimpleNamespace(), Pool()) as verifier:

        def run(case, fault=None):  # two ranks and two micro-batches are needed
            wrong = case.world_size == 2 and case.micro_batches > 1
            return CaseResult(case, not wrong, at(1) if wrong else None)

        verifier.run = run
        smallest = verifier.shrink(failed).case
    assert (smallest.world_size, smallest.micro_batches, smallest.optimizer) == (2, 2, "sgd")
    assert smallest.steps == 2


def test_a_smaller_case_that_proves_nothing_is_not_the_one_that_differs():
    failed = CaseResult(replace(WINDOW, variant="lru"), False, at(5))
    with Verifier(SimpleNamespace(), Pool()) as verifier:
        verifier.run = lambda case, fault=None: CaseResult(case, False, error="the case proves nothing")
        assert verifier.shrink(failed).case == replace(failed.case, steps=6)


def test_cases_run_beside_each_other_each_on_ranks_of_its_own(monkeypatch, job):
    """Both processors have a case at the same time; results keep the order of the table and of the faults."""
    cases = [replace(WINDOW, steps=steps) for steps in (3, 4, 5, 6)]
    both, pools, used = Barrier(2, timeout=60), [], []

    def pool_of(*_):
        pools.append(Pool())
        return nullcontext(pools[-1])

    def run(self, case, fault=None):
        used.append((self._pool, case, fault))
        if fault is None and case in cases:
            both.wait()
        return CaseResult(case, not fault, at(2) if fault else None)

    monkeypatch.setattr(contract, "rank_pool", pool_of)
    monkeypatch.setattr(contract.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Verifier, "run", run)
    monkeypatch.setattr(Verifier, "record", lambda *_: None)
    faults = [BITS, replace(BITS, name="another"), replace(BITS, case=replace(BITS.case, micro_batches=5))]
    report = contract.verify_contract(job, cases, faults, Console(file=StringIO()))
    assert [result.case for result in report.cases] == cases
    assert [result.fault for result in report.faults] == faults and report.passed
    assert len(pools) == 2 and {id(pool) for pool, *_ in used} == {*map(id, pools)}
    clean = [case for _, case, fault in used if fault is None and case not in cases]
    assert sorted(map(str, clean)) == sorted(str(case) for case in {fault.case for fault in faults})
    on_gpu = replace(job, target=replace(job.target, device="cuda"))
    pools.clear()
    contract.verify_contract(on_gpu, [], faults, Console(file=StringIO()))
    assert len(pools) == 1
    contract.verify_contract(job, [], [BITS], Console(file=StringIO()))
    assert len(pools) == 2  # no more than there are cases


def test_an_error_in_one_case_stops_the_ranks_of_the_others(monkeypatch, job):
    """They end after their step, and no case begins."""
    stopped, begun, ended = [], [], Event()

    def run(self, case, fault=None):
        begun.append(case.steps)
        if case.steps == 3:
            raise KeyboardInterrupt
        assert ended.wait(60)
        return CaseResult(case, True)

    class Stopped(Pool):
        def request_stop(self):
            stopped.append(self)
            ended.set()

    monkeypatch.setattr(contract, "rank_pool", lambda *_: nullcontext(Stopped()))
    monkeypatch.setattr(contract.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Verifier, "run", run)
    cases = [replace(WINDOW, steps=steps) for steps in (3, 4, 5, 6, 7)]
    with pytest.raises(KeyboardInterrupt):
        contract.verify_contract(job, cases, console=Console(file=StringIO()))
    assert len(stopped) == 2 and 7 not in begun


def test_the_simplest_case_that_failed_is_made_smaller(monkeypatch, job):
    large, small = (replace(WINDOW, world_size=size) for size in (2, 1))
    died = replace(small, steps=1)
    ends = {large: CaseResult(large, False, at(1)), small: CaseResult(small, False, at(2)),
            died: CaseResult(died, False, error="rank 0 died")}  # fmt: skip
    shrunk = []
    monkeypatch.setattr(contract, "rank_pool", lambda *_: nullcontext(Pool()))
    monkeypatch.setattr(Verifier, "run", lambda self, case, fault=None: ends[case])
    monkeypatch.setattr(Verifier, "shrink", lambda self, failed: shrunk.append(failed) or failed)
    console = Console(file=StringIO(), width=100)
    report = contract.verify_contract(job, [large, died, small], console=console)
    assert shrunk == [ends[small]] and report.smallest is shrunk[0] and not report.passed
    assert "Smallest case that fails" in console.file.getvalue()
    ends[large] = CaseResult(large, True)
    report = contract.verify_contract(job, [large], console=console)
    assert report.passed and report.smallest is None and len(shrunk) == 1


# --- a report


GOOD, BAD = CaseResult(WINDOW, True), CaseResult(WINDOW, False, at(1))
IDLE = CaseResult(WINDOW, False, error="the case proves nothing")
CAUGHT, MISSED = FaultResult(BITS, True, ["bits"], ""), FaultResult(EDGE, False, ["check"], "")


@pytest.mark.parametrize(
    ("cases", "faults", "passed", "line"),
    [
        ([GOOD], [CAUGHT], True, "1 of 1 cases identical, 1 of 1 injected faults caught"),
        ([GOOD], [], True, "1 of 1 cases identical"),
        ([], [CAUGHT], True, "1 of 1 injected faults caught"),
        ([], [], False, ""),
        ([GOOD, BAD], [CAUGHT], False, "1 of 2 cases identical, 1 of 1 injected faults caught"),
        ([IDLE, GOOD], [], False, "1 of 2 cases identical"),
        ([GOOD], [CAUGHT, MISSED], False, "1 of 1 cases identical, 1 of 2 injected faults caught"),
    ],
)
def test_a_report_passes_if_every_case_and_every_fault_does(job, cases, faults, passed, line):
    report = Report(job, cases, faults)
    console = Console(record=True, width=200)
    print_report(report, console)
    text = console.export_text()
    assert report.passed is passed and line in text
    assert text.count("identical ") >= sum(each.identical for each in cases)
    assert text.count("differs") - text.count("run differs from") == cases.count(BAD)
    assert text.count("failed") == cases.count(IDLE)
    assert text.count(" NO ") == faults.count(MISSED)
    document = report.as_json()
    assert [case["identical"] for case in document["cases"]] == [each.identical for each in cases]
    assert [case["error"] for case in document["cases"]] == [each.error for each in cases]
    assert [fault["caught"] for fault in document["faults"]] == [each.caught for each in faults]
