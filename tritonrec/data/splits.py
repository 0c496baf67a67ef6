"""Which events of a log are for training, validation and test.

Every user's events are in the order of time, so each part is a stretch of them::

    events of a user        a   b   c   d   e   f   g   h   i   j
    leave-one-out           [           training            ] [t]
    ... with validation     [         training          ] [v] [t]
    ratio:0.6,0.2,0.2       [     training      ] [ v   v ] [t   t]
    time:V,T                [ before V  ] [ from V to T ] [ from T ]

Training sees nothing of validation and test. In an evaluation the history of a held-out event are the events
before it, of whatever part they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tritonrec.settings import typed

By = Literal["leave-one-out", "ratio", "time"]
Part = Literal["test", "validation"]
NO_PART = "give the loader a split with validation, or a log that is long enough"
WORDS = (
    "leave-one-out, leave-one-out:validation, ratio:TRAIN,VALIDATION,TEST, time:TEST or time:VALIDATION,TEST"
)


@typed
@dataclass(frozen=True)
class Split:
    """A rule; `leave_one_out`, `ratio`, `time` and `parse` make one.

    Args:
        by: the rule. validation, test: 0 or 1 event, or window of impressions, of each user; shares of each
            user's events; timestamps where the parts begin (validation None: there is none), or with `shares`
            the shares of all events in the order of time.

    Raises ValueError for numbers that leave no training or no test events.
    """

    by: By = "leave-one-out"
    validation: float | None = 0
    test: float = 1
    shares: bool = False

    def __post_init__(self) -> None:
        validation, test = self.validation, self.test
        if self.by == "leave-one-out" and (validation not in (0, 1) or test != 1):
            raise ValueError(f"leave-one-out has 0 or 1 event for validation and 1 for test, got {self}")
        if self.by == "ratio" or self.shares:
            if validation is None or not (0 <= validation < 1 and 0 < test < 1 and validation + test < 1):
                raise ValueError(
                    "shares of training, validation (or 0) and test must be above 0 and add up to 1, got "
                    f"{validation} of validation and {test} of test"
                )
        elif self.by == "time" and validation is not None and validation >= test:
            raise ValueError(f"validation must begin before test, got {validation} and {test}")

    @classmethod
    def leave_one_out(cls, validation: bool = False) -> Split:
        """The last event of each user is for test, and the one before for validation."""
        return cls("leave-one-out", int(validation))

    @classmethod
    def ratio(cls, train: float, validation: float, test: float) -> Split:
        """Shares of each user's events, rounded down for validation and test."""
        _check_sum(train, validation, test)
        return cls("ratio", validation, test)

    @classmethod
    def time(cls, test: int, validation: int | None = None) -> Split:
        """Timestamps, in the log's unit, at which test and validation begin, for all users."""
        return cls("time", validation, test)

    @classmethod
    def parse(cls, text: str) -> Split:
        """A rule in words, as on the command line. Raises ValueError for another text.

        ``leave-one-out``, ``leave-one-out:validation``, ``ratio:0.8,0.1,0.1``, ``time:1700000000``,
        ``time:1690000000,1700000000``, or ``time:0.8,0.1,0.1``: shares of all events in the order of time.
        """
        kind, _, rest = text.partition(":")
        words = [word.strip() for word in rest.split(",")] if rest else []
        try:
            if kind == "leave-one-out" and words in ([], ["validation"]):
                return cls.leave_one_out(bool(words))
            if kind in ("ratio", "time") and len(words) == 3:
                train, validation, test = map(float, words)
                _check_sum(train, validation, test)
                return cls("ratio" if kind == "ratio" else "time", validation, test, kind == "time")
            if kind == "time" and len(words) in (1, 2):
                *validation_from, test_from = map(int, words)
                return cls.time(test_from, *validation_from)
        except ValueError as error:
            raise ValueError(f"split {text!r}: {error}; expected {WORDS}") from None
        raise ValueError(f"unknown split {text!r}: expected {WORDS}")

    @property
    def has_validation(self) -> bool:
        """Whether events are held out for validation."""
        return bool(self.validation) or (
            self.by == "time" and not self.shares and self.validation is not None
        )

    def with_validation(self) -> Split:
        """The rule with validation: itself where it has some. ValueError where nothing says how much."""
        if self.has_validation:
            return self
        if self.by == "leave-one-out":
            return Split.leave_one_out(True)
        raise ValueError(f"{self} has no validation: say how much, as in {WORDS}")

    def __str__(self) -> str:
        if self.by == "leave-one-out":
            return f"leave-one-out{':validation' if self.validation else ''}"
        if self.by == "time" and not self.shares:
            return f"time:{self.test if self.validation is None else f'{self.validation},{self.test}'}"
        assert self.validation is not None
        return f"{self.by}:{1 - self.validation - self.test:.6g},{self.validation:g},{self.test:g}"

    def resolved(self, timestamps: np.ndarray) -> Split:
        """Shares of all events as the times where they begin, by the `timestamps` (N,) int64 of the log."""
        if not self.shares:
            return self
        assert self.validation is not None
        rows = len(timestamps)
        test, validation = share_of(rows, self.test), share_of(rows, self.validation)
        if not test or rows == test + validation:
            raise ValueError(f"{self} leaves a part of the {rows} events empty: give the log more of them")
        first, second = np.partition(timestamps, (rows - test - validation, rows - test))[
            [rows - test - validation, rows - test]
        ]
        return Split.time(int(second), int(first) if validation and first < second else None)

    def check_streamed(self) -> None:
        """Raise ValueError for shares of all events, of which a stream has some at a time."""
        if self.shares:
            raise ValueError(
                f"{self} goes by all events of the log, which a stream does not have: give times as "
                "time:VALIDATION,TEST, or read the log whole (--no-stream; NextItemLoader, ImpressionLoader)"
            )

    def counts(
        self, offsets: np.ndarray, timestamps: np.ndarray, unit: int = 1, least: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of each user how many events are for training and for validation (U,) int64; the rest is for test.

        Args:
            offsets: (U + 1,) int64, of the users' events. timestamps: (N,) int64, ascending in each user.
            unit: events that leave-one-out holds out. least: events that it leaves for training.

        Raises ValueError for shares of all events (`resolved`).
        """
        lengths = np.diff(offsets)
        if self.by == "leave-one-out":
            test = np.clip(lengths - least, 0, unit)
            validation = np.clip(lengths - test - least, 0, unit) * int(self.validation or 0)
            return lengths - test - validation, validation
        if self.by == "ratio":
            assert self.validation is not None
            validation = share_of(lengths, self.validation)
            return lengths - validation - share_of(lengths, self.test), validation
        self.check_streamed()
        first = self.test if self.validation is None else self.validation
        before = [_counts(timestamps < time, offsets) for time in (first, self.test)]
        return before[0], before[1] - before[0]


def share_of(count: np.ndarray | int, share: float) -> np.ndarray:
    """The whole events of a share; 0.29 of 100 are 29, though 0.29 * 100 is a little less."""
    return np.floor(np.asarray(count) * share + 1e-9).astype(np.int64)


def _counts(chosen: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Of each user the chosen events (U,) int64."""
    return np.diff(np.append(0, np.cumsum(chosen))[offsets]).astype(np.int64)


def _check_sum(train: float, validation: float, test: float) -> None:
    if not train > 0 or not math.isclose(train + validation + test, 1, abs_tol=1e-6):
        raise ValueError(f"shares must add up to 1, got {train} + {validation} + {test}")


def rows_of(split: Split, rows: int, trained: int, share: float) -> tuple[int, int]:
    """Training and validation rows of a log in the order of time that has no users and no times.

    Args:
        trained: rows before those that the log itself has for test. share: of these rows, for validation.

    Raises ValueError for a split by time, and where no row is left for training.
    """
    if split.by == "leave-one-out":
        validated = math.ceil(trained * share) if split.has_validation else 0
        trained -= validated
    elif split.by == "ratio":
        counts = split.counts(np.array([0, rows]), np.empty(0))
        trained, validated = (int(each[0]) for each in counts)
    else:
        raise ValueError(
            f"a log of clicks has no times to divide by {split}: take ratio:TRAIN,VALIDATION,TEST"
        )
    if trained < 1:
        raise ValueError(f"{split} leaves none of {rows} rows for training")
    return trained, validated


def check_part(part: Part) -> Part:
    """The part; ValueError for something else."""
    if part not in get_args(Part):
        raise ValueError(f"part must be {' or '.join(map(repr, get_args(Part)))}, got {part!r}")
    return part


def held_out(
    offsets: np.ndarray, trained: np.ndarray, validated: np.ndarray, part: Part
) -> tuple[np.ndarray, np.ndarray]:
    """User and place among the user's events, of each event of a part that has an earlier one; user by user.

    Raises ValueError for another part.
    """
    lengths = np.diff(offsets)
    first, last = trained, trained + validated
    if check_part(part) == "test":
        first, last = last, lengths
    first = np.maximum(first, 1)
    counts = np.maximum(last - first, 0)
    users = np.repeat(np.arange(len(lengths)), counts)
    places = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts) + first[users]
    return users, places
