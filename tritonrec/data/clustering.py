"""Key-centric sample clustering: micro-batches whose samples share keys (NestPipe, section V.C).

A frozen window of N micro-batches exchanges each key once per micro-batch that contains it. A plain cut of
the batch scatters a key over many micro-batches, so the payload grows with N. Clustering puts samples that
share keys together::

    sample       0      1      2      3               exchanged keys
    keys        a b    c d    a b    c e
    plain      [ 0      1 ] [  2      3 ]             a b c d | a b c e    8 of 5 distinct: inflation 1.6
    clustered  [ 1      3 ] [  0      2 ]             c d e   | a b        5 of 5 distinct: inflation 1.0

The scheme is one greedy pass. Each micro-batch starts with the remaining sample of the largest weight of
shared keys. It then takes the sample with the largest part of its keys in the micro-batch already, until it
has its share of the keys. A key of h samples has weight 1 / h, and 0 if h = 1: popular keys are in every
micro-batch anyway. Weights are integers and ties go to the earlier sample, so every machine finds the same
partition.

No computation hides the first exchange of rows and the last one of gradients, so the two micro-batches with
the fewest keys stand at the ends of the window, the fewest last: an exact gradient has more bytes than a row.
(MovieLens-100K, N = 8, without negatives: the ends' share of all exchanged keys falls from 13.2 to 8.5 %,
where 1/N is 12.5 %.)

Offline, as the paper also has it, samples of two micro-batches then change places while any such swap saves
a key (`clustering_swaps`). It takes ten to a hundred times as long, and saves 5 to 7 % more where samples
have a taste in common (docs/scale.md).

A batch of 128 sequences of up to 50 tokens takes about one millisecond with 4 negatives per token, on the
CPU, in the data stage. Random negatives are shared by chance only, so clustering gains less with more of them
(MovieLens-100K, N = 8: inflation falls from 3.15 to 2.57 without negatives, and from 6.75 to 6.46 with 4 per
token).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.batch import Batch
from tritonrec.data.jagged import check_offsets
from tritonrec.kernels.launch import unique
from tritonrec.settings import typed

from ..kernels.caches import njit

_UNIT = 1 << 20  # a key of h samples has weight _UNIT // h; sums of weights stay far below 2**53


def split(
    batch: Batch, num_micro_batches: int, clustering: bool = False, taper: float = 1.0, swaps: bool = False
) -> list[Tensor]:
    """Cut a batch on the CPU into micro-batches: N int64 tensors of sample indices, every sample in one.

    Plain: consecutive samples, in numbers that differ by one at most. Clustered: by shared keys; a
    micro-batch exceeds its share of the batch's keys (`sample_keys`, repeats counted) by less than one
    sample, and none is empty if there are N samples; those with the fewest distinct keys come first and last.
    With fewer samples the last micro-batches are empty. With `taper` below 1 the shares are those of
    `tapered`. With `swaps` samples of two clustered micro-batches change places while that saves a key.

    Raises ValueError for N below 1, and for `sample_keys` whose offsets and keys do not fit together.
    """
    shares = tapered(num_micro_batches, taper)
    samples = torch.arange(batch.num_samples, device="cpu")
    if num_micro_batches == 1:
        return [samples]
    if not clustering and taper == 1:
        return list(samples.tensor_split(num_micro_batches))
    if not clustering:
        ends = (shares.cumsum(0)[:-1] * batch.num_samples).round().long()
        return list(samples.tensor_split(ends))
    offsets, keys = batch.sample_keys()
    check_offsets(offsets, len(keys), "offsets of sample_keys()", "keys")
    distinct, numbers, _ = unique(keys)
    order, ends, payloads = _cluster(offsets.numpy(), numbers.numpy(), len(distinct), shares.numpy())
    if swaps:
        # Every sample is in one micro-batch: their numbers, in the order of the samples.
        place = np.empty_like(order)
        place[order] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        own, keys = _keys_of_samples(offsets.numpy(), numbers.numpy(), len(distinct))
        sizes = np.bincount(place, np.diff(own), len(ends)).astype(np.int64)
        payloads, order = _swap(own, keys, len(distinct), place, sizes), np.argsort(place, kind="stable")
    return _fewest_at_the_ends(
        torch.from_numpy(order).tensor_split(torch.from_numpy(ends[:-1])), payloads.tolist()
    )


def _fewest_at_the_ends(parts: Sequence[Tensor], payloads: list[int]) -> list[Tensor]:
    """The parts in the order of a window: fewer keys nearer to its ends, and those without a sample last."""
    filled = [part for part in range(len(parts)) if len(parts[part])]
    filled.sort(key=lambda part: (payloads[part], -part))
    empty = [part for part in range(len(parts)) if not len(parts[part])]
    return [parts[part] for part in (*filled[1::2], *reversed(filled[::2]), *empty)]


@typed
def tapered(num_micro_batches: int, taper: float) -> Tensor:
    """Shares (N,) float64 of the micro-batches of a window, small at both ends; they add up to 1.

    Each micro-batch has `taper` times the share of its neighbour nearer to the middle: N = 5 and 0.5 give
    1/10, 2/10, 4/10, 2/10, 1/10. No computation hides the exchange of rows for the first micro-batch, nor the
    exchange of gradients after the last one.
    """
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
    if not 0 < taper <= 1:
        raise ValueError(f"taper is a ratio of sizes in (0, 1], got {taper}")
    places = torch.arange(num_micro_batches, device="cpu")
    from_the_end = torch.minimum(places, places.flip(0))
    shares = (taper ** (from_the_end.max() - from_the_end).double()).clamp_min(1e-9)  # 0 is no share
    return shares / shares.sum()


def payload_inflation(batch: Batch, micro_batches: list[Tensor]) -> float:
    """Sum of the micro-batches' distinct keys, divided by the batch's distinct keys: at least 1.0."""
    whole = len(torch.unique(batch.sample_keys()[1]))
    parts = sum(len(torch.unique(batch.select(indices).sample_keys()[1])) for indices in micro_batches)
    return parts / whole if whole else 1.0


@njit(cache=True, nogil=True)
def _cluster(offsets, numbers, num_keys, shares):
    """Samples (B,) in the order of their micro-batches, and of each its end there and its distinct keys (N,).

    `numbers` are the samples' keys renumbered from 0, jagged by `offsets`. `shares` (N,) float64 are the
    micro-batches' shares of the keys, repeats counted.
    """
    num_samples = len(offsets) - 1
    key_offsets, keys = _keys_of_samples(offsets, numbers, num_keys)
    sample_offsets, key_samples = _samples_of_keys(key_offsets, keys, num_keys)

    weights = np.zeros(num_keys, dtype=np.int64)
    for key in range(num_keys):
        count = sample_offsets[key + 1] - sample_offsets[key]
        if count > 1:
            weights[key] = _UNIT // count
    total = np.zeros(num_samples, dtype=np.int64)
    for sample in range(num_samples):
        for at in range(key_offsets[sample], key_offsets[sample + 1]):
            total[sample] += weights[keys[at]]

    num_micro_batches = len(shares)
    order = np.empty(num_samples, dtype=np.int64)
    ends = np.empty(num_micro_batches, dtype=np.int64)
    payloads = np.zeros(num_micro_batches, dtype=np.int64)
    free = np.ones(num_samples, dtype=np.bool_)
    last_micro_batch = np.full(num_keys, -1, dtype=np.int64)  # the micro-batch that took the key last
    placed = 0
    left = offsets[num_samples]
    for micro_batch in range(num_micro_batches):
        later = num_micro_batches - 1 - micro_batch
        share = np.ceil(left * (shares[micro_batch] / shares[micro_batch:].sum()) - 1e-6)
        begin, taken = placed, 0
        shared_weights = np.zeros(num_samples, dtype=np.int64)  # of the sample's keys in this micro-batch
        while placed < num_samples:
            is_enough = taken >= share or num_samples - placed <= later
            if later > 0 and placed > begin and is_enough:
                break
            best, best_score = -1, -1.0
            for sample in range(num_samples):
                if free[sample]:
                    score = float(total[sample])
                    if placed > begin:
                        score = shared_weights[sample] / max(total[sample], 1)
                    if score > best_score:
                        best, best_score = sample, score
            free[best] = False
            order[placed] = best
            placed += 1
            taken += offsets[best + 1] - offsets[best]
            for at in range(key_offsets[best], key_offsets[best + 1]):
                key = keys[at]
                if last_micro_batch[key] != micro_batch:
                    last_micro_batch[key] = micro_batch
                    payloads[micro_batch] += 1
                    for at_sample in range(sample_offsets[key], sample_offsets[key + 1]):
                        shared_weights[key_samples[at_sample]] += weights[key]
        left -= taken
        ends[micro_batch] = placed
    return order, ends, payloads


@njit(cache=True, nogil=True)
def _keys_of_samples(offsets, numbers, num_keys):
    """Distinct keys of each sample, jagged: key_offsets (B + 1,), keys."""
    num_samples = len(offsets) - 1
    key_offsets = np.zeros(num_samples + 1, dtype=np.int64)
    keys = np.empty(len(numbers), dtype=np.int64)
    seen_by = np.full(num_keys, -1, dtype=np.int64)
    filled = 0
    for sample in range(num_samples):
        for at in range(offsets[sample], offsets[sample + 1]):
            key = numbers[at]
            if seen_by[key] != sample:
                seen_by[key] = sample
                keys[filled] = key
                filled += 1
        key_offsets[sample + 1] = filled
    return key_offsets, keys[:filled]


@njit(cache=True, nogil=True)
def _samples_of_keys(key_offsets, keys, num_keys):
    """Samples of each key, jagged: sample_offsets (U + 1,), key_samples."""
    sample_offsets = np.zeros(num_keys + 1, dtype=np.int64)
    for key in keys:
        sample_offsets[key + 1] += 1
    sample_offsets = np.cumsum(sample_offsets)
    cursor = sample_offsets[:-1].copy()
    key_samples = np.empty(len(keys), dtype=np.int64)
    for sample in range(len(key_offsets) - 1):
        for at in range(key_offsets[sample], key_offsets[sample + 1]):
            key_samples[cursor[keys[at]]] = sample
            cursor[keys[at]] += 1
    return sample_offsets, key_samples


@njit(cache=True, nogil=True)
def _swap(offsets, keys, num_keys, place, sizes):
    """Swap samples between micro-batches, in place, until no swap saves a key; `place` (B,) is theirs.

    `keys` are the distinct ones of each sample. The larger of two micro-batches, `sizes` (N,) in keys, never
    grows. Returns the micro-batches' distinct keys (N,).
    """
    count = np.zeros((len(sizes), num_keys), np.int64)  # samples of a micro-batch that have a key
    samples = len(place)
    for sample in range(samples):
        for at in range(offsets[sample], offsets[sample + 1]):
            count[place[sample], keys[at]] += 1
    has = np.zeros(num_keys, np.bool_)
    found = True
    while found:
        found = False
        for one in range(samples):
            for at in range(offsets[one], offsets[one + 1]):
                has[keys[at]] = True
            length = offsets[one + 1] - offsets[one]
            best, best_saved = -1, 0
            for other in range(samples):
                a, b, grows = place[one], place[other], offsets[other + 1] - offsets[other] - length
                if a == b or max(sizes[a] + grows, sizes[b] - grows) > max(sizes[a], sizes[b]):
                    continue
                saved = 0
                for at in range(offsets[one], offsets[one + 1]):
                    saved += (count[a, keys[at]] == 1) - (count[b, keys[at]] == 0)
                for at in range(offsets[other], offsets[other + 1]):
                    key = keys[at]
                    saved += (count[b, key] == 1) - (count[a, key] == 0)
                    if has[key]:  # both have it: it stays in both micro-batches
                        saved -= (count[a, key] == 1) + (count[b, key] == 1)
                if saved > best_saved:
                    best, best_saved = other, saved
            for at in range(offsets[one], offsets[one + 1]):
                has[keys[at]] = False
            if best < 0:
                continue
            found = True
            a, b, grows = place[one], place[best], offsets[best + 1] - offsets[best] - length
            place[one], place[best] = b, a
            sizes[a], sizes[b] = sizes[a] + grows, sizes[b] - grows
            for at in range(offsets[one], offsets[one + 1]):
                count[a, keys[at]] -= 1
                count[b, keys[at]] += 1
            for at in range(offsets[best], offsets[best + 1]):
                count[b, keys[at]] -= 1
                count[a, keys[at]] += 1
    return (count > 0).sum(1)
