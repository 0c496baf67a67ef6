"""Users' histories in memory, which grow by events; a model scores them whole.

Dimensions: B users, L events.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ..data.jagged import offsets_of
from .histories import Ids, array_of, times_of, told
from .predictor import Predictor
from .programs import NEXT_ITEM

User = Hashable


@dataclass(frozen=True)
class History:
    """Of one user, oldest first: ids and timestamps (L,) int64, cut to what a model takes.

    words: they were given as words. timed: with timestamps. cut: there were older events.
    """

    ids: Tensor
    timestamps: Tensor
    words: bool
    timed: bool
    cut: bool

    def last(self, longest: int) -> History:
        """The last events."""
        if len(self.ids) <= longest:
            return self
        ids, times = self.ids[-longest:].clone(), self.timestamps[-longest:].clone()
        return History(ids, times, self.words, self.timed, True)


class UserHistories:
    """Histories by user, whose events `encode` computes at each call. Calls may come from several threads.

    `CachedPredictor` is one that keeps keys and values, with the same bits.

    Attributes:
        predictor: of the export.
    """

    _what = "a user's history"

    def __init__(self, predictor: Predictor):
        self._lock = RLock()
        self._histories: dict[User, History] = {}
        self._use_predictor(predictor)

    def _use_predictor(self, predictor: Predictor) -> None:
        dense = predictor.dense_of(NEXT_ITEM, self._what)
        self.predictor = predictor
        self._longest, self._timed = dense["max_seq_len"], bool(dense["timestamps"])

    def __len__(self) -> int:
        return len(self._histories)

    def __contains__(self, user: object) -> bool:
        return user in self._histories

    def take_histories(self, before: UserHistories) -> None:
        """Go on with the histories of another version, whose own stay as they are.

        Raises ValueError where they are not those that this version needs: cut shorter than it takes, without
        timestamps, or of words with other ids. Nothing is taken then.
        """
        with before._lock, self._lock:
            before._check_histories(self.predictor)
            self._histories = {user: each.last(self._longest) for user, each in before._histories.items()}

    def _check_histories(self, predictor: Predictor) -> None:
        dense = predictor.dense_of(NEXT_ITEM, self._what)
        before, now = (each.vocabularies.get("item") for each in (self.predictor, predictor))
        if before is not None and self._histories:
            if now is None:
                raise ValueError("the histories here were numbered by words, and the export has none")
            now.check_extends(before, "item")
        for user, history in self._histories.items():
            if history.cut and dense["max_seq_len"] > self._longest:
                raise ValueError(
                    f"the history of user {user!r} was cut to {self._longest} events, and the export takes "
                    f"{dense['max_seq_len']}: load it anew, and replace() the histories"
                )
            if dense["timestamps"] and not history.timed:
                raise ValueError(f"the export goes by times, and user {user!r} has events without timestamps")

    def append(self, user: User, items: Any, timestamps: Any = None) -> None:
        """Add events behind those of a user, if there are any. Nothing is computed.

        Args:
            items: (n,) int64, or words. timestamps: (n,) int64, for a model with times; they may not go back.

        Raises ValueError for what `Predictor.encode` refuses, and for an event before the user's last one:
        `replace` puts it in its place. Nothing is added then.
        """
        check_user(user)
        with self._lock:
            before = self._histories.get(user)
            new = self._history(items, timestamps)
            timed = new.timed if before is None else new.timed and before.timed
            if timed:
                times = (
                    new.timestamps if before is None else torch.cat([before.timestamps[-1:], new.timestamps])
                )
                if bool((back := times.diff() < 0).any()):
                    at = int(back.nonzero()[0])
                    raise ValueError(
                        f"an event of user {user!r} at {int(times[at + 1])} is before one at "
                        f"{int(times[at])}: give the whole history to replace()"
                    )
            if before is not None:
                new = History(
                    torch.cat([before.ids, new.ids]), torch.cat([before.timestamps, new.timestamps]),
                    before.words or new.words, timed, before.cut,
                )  # fmt: skip
            self._put(user, new)

    def replace(self, user: User, history: Any, timestamps: Any = None) -> None:
        """Make this a user's history, which may begin as the old one: what is equal so far stays cached.

        Arguments and errors as those of `append`; timestamps may go back, as those of `Predictor.encode`.
        """
        check_user(user)
        with self._lock:
            self._put(user, self._history(history, timestamps))

    def _put(self, user: User, whole: History) -> None:
        """Keep the last events of a history."""
        self._histories[user] = whole.last(self._longest)

    def _history(self, items: Any, timestamps: Any) -> History:
        if isinstance(items, (int, float)):
            raise ValueError(f"items must be (n,), got {told(items)}: give a list")
        ids, words = array_of(items, "history", self.predictor.vocabularies.get("item"))
        times = times_of(timestamps, items, ids, self._timed)
        timed = timestamps is not None or getattr(items, "timestamps", None) is not None
        return History(ids.clone(), times.clone(), words, timed, False)

    def history(self, user: User) -> tuple[Tensor, Tensor]:
        """Ids and timestamps (L,) int64 of a user, at most ``max_seq_len``; KeyError for an unknown one."""
        with self._lock:
            found = self._of(user)
            return found.ids.clone(), found.timestamps.clone()

    def forget(self, user: User) -> None:
        """Remove a user's history; an unknown one is no error."""
        with self._lock:
            self._histories.pop(user, None)

    def encode(self, users: Sequence[User]) -> Tensor:
        """User vectors (B, d) float32, each user as often as named.

        Raises KeyError for a user without a history, and ValueError for one without events.
        """
        with self._lock:
            found = [self._of(user) for user in listed(users)]
            times = torch.cat(
                [*(each.timestamps for each in found), torch.empty(0, dtype=torch.int64, device="cpu")]
            )
            return self.predictor.encode([each.ids for each in found], times)

    def ids(self, users: Sequence[User]) -> Ids:
        """Histories of users, as `Predictor` takes them; KeyError for an unknown one."""
        with self._lock:
            histories = [self._of(user) for user in listed(users)]
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            lengths = torch.tensor([len(each.ids) for each in histories], dtype=torch.int64, device="cpu")
            ids = torch.cat([none, *(each.ids for each in histories)])
            return Ids(ids, offsets_of(lengths), any(each.words for each in histories))

    def _of(self, user: User) -> History:
        check_user(user)
        if user not in self._histories:
            raise KeyError(f"user {user!r} has no history here: append() or replace() it")
        return self._histories[user]


def check_user(user: Any) -> None:
    if isinstance(user, Tensor) or not isinstance(user, Hashable):
        raise ValueError(f"a user is named by a number or a text, got {type(user).__name__}")


def listed(users: Any) -> list[User]:
    """The users of a call."""
    if isinstance(users, Tensor) and users.dim() == 1:
        return users.tolist()
    if not isinstance(users, (list, tuple, range)):
        raise ValueError(f"users must be a list, got {type(users).__name__}: [user] is one")
    for user in users:
        check_user(user)
    return list(users)
