"""What a process of a search does instead of training, by name, since it is imported there."""

import os
import time

from tritonrec.harness.fuzz.configuration import Configuration
from tritonrec.harness.fuzz.report import Failure, Try
from tritonrec.harness.fuzz.rounds import End


def rounds(connection, asked, work):
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        connection.send(work(connection, asked, given))


def tries(connection, asked, fault):
    """As many as the round wants: the simplest configuration, which each round has, and others of its own."""

    def work(connection, asked, given):
        for number in range(given.count):
            one = Configuration(seed=given.seed * number % 1000, steps=1 + number)
            connection.send(one)
            connection.send(Try(one, "too N" if number == 1 else "", tensors=2, bytes=3, shown=("evicted",)))
        return End(shrinking=1)

    rounds(connection, asked, work)


def fails(connection, asked, fault):
    def work(connection, asked, given):
        return End(4, Failure({"seed": given.seed}, "step 0", "tritonrec fuzz", 3))

    rounds(connection, asked, work)


def dies(connection, asked, fault):
    def work(connection, asked, given):
        connection.send(Configuration(mode="dbp", seed=given.seed % 1000))
        os._exit(3)

    rounds(connection, asked, work)


def dies_at_once(connection, asked, fault):
    os._exit(5)


def waits(connection, asked, fault):
    """Until it is asked to stop."""

    def work(connection, asked, given):
        one = Configuration(seed=given.seed % 1000)
        connection.send(one)
        connection.send(Try(one))
        while not asked.is_set():
            time.sleep(0.01)
        return End()

    rounds(connection, asked, work)
