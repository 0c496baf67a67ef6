"""Items come in order, made ahead of their consumer, but never further ahead than was asked."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.data import prefetch as prefetching
from tritonrec.data.prefetch import prefetch

LONG = 60  # seconds after which a test that waits for an event has failed


def prefetching_threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@settings(deadline=None)
@given(st.lists(st.integers(), max_size=20), st.integers(1, 5))
def test_order_is_kept(items, depth):
    assert list(prefetch(items, depth)) == items


@pytest.mark.parametrize("depth", [1, 3])
def test_making_runs_beside_consuming(depth):
    """While item 0 is in use, items 1 ... depth are made: the consumer asks for none of them."""
    made = [threading.Event() for _ in range(10)]

    def items():
        for number, event in enumerate(made):
            event.set()
            yield number

    ahead = prefetch(items(), depth)
    assert next(ahead) == 0
    assert all(event.wait(LONG) for event in made[: depth + 1])
    assert list(ahead) == list(range(1, 10))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_nothing_is_made_further_ahead_than_depth(depth, monkeypatch):
    """Once the thread waits for room while item k is in use, items 0 ... k + depth are made, and no other."""
    made, blocked_with, blocked = [], [], threading.Condition()

    class Watched(threading.Semaphore):
        def acquire(self):
            if not super().acquire(blocking=False):
                with blocked:
                    blocked_with.append(len(made))
                    blocked.notify()
                super().acquire()

    monkeypatch.setattr(prefetching, "Semaphore", Watched)
    ahead = prefetch((made.append(number) or number for number in range(30)), depth)
    for number in range(30 - depth):
        assert next(ahead) == number
        with blocked:
            enough = number + depth + 1
            assert blocked.wait_for(lambda least=enough: max(blocked_with, default=0) >= least, LONG)
            assert blocked_with[-1] == enough
    assert list(ahead) == list(range(30 - depth, 30)) and made == list(range(30))


def test_an_error_comes_where_its_item_would_have_come():
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    ahead = prefetch(items(), 5)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_an_abandoned_thread_ends():
    before = prefetching_threads()
    closed = threading.Event()

    def items():
        try:
            yield from range(10**9)
        finally:
            closed.set()

    source = items()
    ahead = prefetch(source, 2)
    assert next(ahead) == 0 and prefetching_threads() == before + 1
    ahead.close()
    assert prefetching_threads() == before
    source.close()
    assert closed.is_set()


def test_depth_is_checked_at_once():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        prefetch([], 0)
