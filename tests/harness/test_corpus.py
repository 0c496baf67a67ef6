"""Promise: public bugs, injected into our code, are noticed; the list of them is complete."""

import re
from pathlib import Path

import pytest
from commands import invoke
from speeds import slow_except

from tritonrec.harness.verify.corpus import PUBLIC, SOURCES
from tritonrec.harness.verify.tools import FAULTS, SELECTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bugs.md"
QUICK = ("second-moment-with-beta-1", "prefetch-counts-on-one-rank", "remainder-lost-in-resharding")


@pytest.mark.if_changed
@pytest.mark.multi_rank
@pytest.mark.parametrize("name", slow_except(QUICK, [fault.name for fault in PUBLIC]))
def test_a_public_bug_is_noticed(verifier, name):
    fault = next(fault for fault in PUBLIC if fault.name == name)
    result = verifier.run_fault(fault)
    assert result.caught, result.evidence
    assert ("error" if fault.says else "bits") in result.by
    if fault.injection.schedule is not None:
        assert "check" in result.by


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_a_fault_in_a_group_of_ranks_does_not_outlive_its_run(verifier):
    fault = next(fault for fault in PUBLIC if fault.name == "dense-gradients-not-exchanged")
    assert not verifier.run(fault.case, fault.name).identical
    assert verifier.run(fault.case).identical


def test_every_bug_has_a_thread_and_a_name_of_its_own():
    assert len(PUBLIC) >= 40
    names = [fault.name for fault in SELECTIONS[True, True]]
    assert len(set(names)) == len(names) == len({fault.description for fault in SELECTIONS[True, True]})
    assert SOURCES.keys() == {fault.name for fault in PUBLIC}
    assert len(set(SOURCES.values())) == len(SOURCES)
    for source in SOURCES.values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source)
    of_both = [fault for fault in FAULTS if fault.name in SOURCES]
    assert of_both and [fault for fault in PUBLIC if fault in FAULTS] == of_both
    assert SELECTIONS[True, True] == [*FAULTS, *(fault for fault in PUBLIC if fault not in FAULTS)]
    assert (SELECTIONS[False, False], SELECTIONS[True, False], SELECTIONS[False, True]) == (
        [],
        FAULTS,
        PUBLIC,
    )


@pytest.mark.parametrize("size", ["--quick", "--full"])
def test_the_corpus_takes_no_size_of_a_table(size):
    status, output, _ = invoke("verify", "--corpus", size)
    assert status == 2 and "--corpus runs no table: leave --quick and --full out" in output


def test_the_page_lists_every_bug_and_who_noticed_it():
    page = PAGE.read_text()
    for fault in PUBLIC:
        assert f"| {fault.description} |" in page, f"docs/bugs.md lacks {fault.name}: see ci/bugs_table.py"
    assert "**nothing**" not in page
    assert page.count("github.com") == len(PUBLIC)
