# mypy: ignore-errors
"""The loops of checksums on the CPU."""

from ..caches import njit


@njit(cache=True, nogil=True)
def add_words(words, weights, sums):
    """``sums[i] = sum(words[i, j] * weights[j])`` in int64, which wraps; words and weights are int32."""
    for i in range(words.shape[0]):
        total = 0
        for j in range(words.shape[1]):
            total += words[i, j] * weights[j]
        sums[i] = total


@njit(cache=True, nogil=True)
def add_chunks(words, rest, of_words, of_chunks):
    """`checksum` of int32 words and of up to three bytes behind them."""
    size, total, last = len(of_words), 0, 0
    for i in range(len(rest)):
        last |= rest[i] << 8 * i
    for chunk in range(len(of_chunks)):
        first, of_chunk = chunk * size, 0
        for j in range(min(size, len(words) - first)):
            of_chunk += words[first + j] * of_words[j]
        if 0 <= len(words) - first < size:
            of_chunk += last * of_words[len(words) - first]
        total += of_chunk * of_chunks[chunk]
    return total + 4 * len(words) + len(rest)
