"""An accelerator made of threads: a stream runs what was queued later, in order and behind its events."""

import queue
import threading
import time
from random import Random

from tritonrec.pipeline.streams import Streams

LONGEST = 300  # seconds: kernels may be compiled meanwhile


class FakeEvent:
    def __init__(self, lane):
        self.lane, self.done, self.error = lane, threading.Event(), None


class FakeAccelerator(Streams):
    """Streams that defer all work, with waits drawn from a seed before each piece.

    `slow` holds one lane back. `log` has (lane, lanes of the events waited for) of every piece queued.
    """

    def __init__(self, seed=0, slow=""):
        self._random, self._slow = Random(seed), slow
        self._queues = {}
        self.log = []
        self.begun = 0

    def begin(self):
        self.begun += 1

    def run(self, lane, after, work):
        if lane not in self._queues:
            self._queues[lane] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._queues[lane],), daemon=True).start()
        event = FakeEvent(lane)
        self.log.append((lane, tuple(sorted(each.lane for each in after))))
        wait = 0.05 if lane == self._slow else self._random.random() * 0.004
        self._queues[lane].put((tuple(after), work, event, wait))
        return event

    def finish(self, event):
        self._await(event)
        if event.error is not None:
            raise event.error

    def _await(self, event):
        if not event.done.wait(LONGEST):
            raise TimeoutError(f"the stream of {event.lane} is stuck")

    def _work(self, pieces):
        failed = None
        while True:
            after, work, event, wait = pieces.get()
            try:
                for other in after:
                    self._await(other)  # what runs ahead of it computes other bits
                    failed = failed or other.error
                time.sleep(wait)
                if failed is None:
                    work()
            except Exception as error:
                failed = error
            event.error = failed
            event.done.set()
