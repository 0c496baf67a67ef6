"""Labels of tasks: made of ratings by a threshold, and checked to tell anything apart."""

from __future__ import annotations

import numpy as np

CLICK_RATING, CONVERSION_RATING = 4.0, 5.0
"""Of ratings of up to 5: the smallest one that is a click where nobody says which, and a conversion's."""


def default_threshold(rating: np.ndarray) -> float:
    """`CLICK_RATING`. Raises ValueError for ratings (N,) on a larger scale, of which it says nothing."""
    if (rating > CONVERSION_RATING).any():
        raise ValueError(
            f"ratings go up to {np.nanmax(rating):g}, and which are clicks is known of ratings of up to "
            f"{CONVERSION_RATING:g} only: set label_threshold"
        )
    return CLICK_RATING


def default_rule(with_conversions: bool = False) -> str:
    """What `default_threshold` makes of ratings, in words."""
    conversion = f", of {CONVERSION_RATING:g} a conversion" if with_conversions else ""
    return f"a rating of at least {CLICK_RATING:g} is a click{conversion}; label_threshold sets another"


def rating_labels(rating: np.ndarray, threshold: float) -> np.ndarray:
    """(N,) bool: ratings (N,) of at least `threshold`. Raises ValueError for a missing one."""
    if np.isnan(rating).any():
        raise ValueError(f"row {int(np.isnan(rating).argmax())} has no rating, which its label is made of")
    return rating >= threshold


def check_ratings(rating: np.ndarray, threshold: float) -> None:
    """Raise ValueError where all or none of the ratings (N,) are at least `threshold`."""
    labels = rating_labels(rating, threshold)
    if len(labels) > 1 and labels.all() == labels.any():
        many = "all" if labels.all() else "none"
        raise ValueError(
            f"{many} of {len(labels)} ratings are at least {threshold:g}, so that all labels are alike: they "
            f"go from {rating.min():g} to {rating.max():g}; set label_threshold"
        )


def check_labels(task: str, labels: np.ndarray) -> None:
    """Raise ValueError where all labels (n,) of a task are alike: there is nothing to learn, and no AUC."""
    check_counts(task, len(labels), int(labels.sum()))


def check_counts(task: str, rows: int, positive: int) -> None:
    """As `check_labels`, of so many rows with so many labels that are 1."""
    if rows > 1 and positive in (0, rows):
        raise ValueError(
            f"all {rows} labels of task {task!r} are {int(positive > 0)}: set label_threshold, or leave the "
            "task out"
        )
