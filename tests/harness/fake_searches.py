"""What a process of a search does instead of training, by name, since it is imported there."""

import os
import time

from tritonrec.harness.fuzz.configuration import Configuration
from tritonrec.harness.fuzz.report import Failure, Try
from tritonrec.harness.fuzz.rounds import End


def rounds(connection, work):
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        connection.send(work(connection, given))


def tries(connection, enough, asked, fault):
    """The simplest configuration, which each round has, and others of its own."""

    def work(connection, given):
        for number in range(25):
            one = Configuration(seed=given.seed * number % 1000, steps=1 + number)
            connection.send(one)
            connection.send(Try(one, "too N" if number == 1 else "", tensors=2, bytes=3, shown=("evicted",)))
        return End(shrinking=1)

    rounds(connection, work)


def fails(connection, enough, asked, fault):
    def work(connection, given):
        return End(4, Failure({"seed": given.seed}, "step 0", "tritonrec fuzz", 3))

    rounds(connection, work)


def dies(connection, enough, asked, fault):
    def work(connection, given):
        connection.send(Configuration(mode="dbp", seed=given.seed % 1000))
        os._exit(3)

    rounds(connection, work)


def dies_at_once(connection, enough, asked, fault):
    os._exit(5)


def makes_small(connection, enough, asked, fault):
    """A failing configuration, until there are enough others."""

    def work(connection, given):
        for steps in range(1, 4):
            connection.send(Try(Configuration(steps=steps)))
        enough.wait(60)
        small = {"seed": given.seed, "asked": asked.is_set()}
        return End(9, Failure(small, "step 0", "tritonrec fuzz", 3))

    rounds(connection, work)


def waits(connection, enough, asked, fault):
    """Until it is asked to stop."""

    def work(connection, given):
        one = Configuration(seed=given.seed % 1000)
        connection.send(one)
        connection.send(Try(one))
        while not asked.is_set():
            time.sleep(0.01)
        return End()

    rounds(connection, work)
