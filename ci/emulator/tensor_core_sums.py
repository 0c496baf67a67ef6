"""Errors of split float32 products under models of a tensor core: ``python ci/emulator/tensor_core_sums.py``.

How hardware adds inside of a matrix instruction is not documented. In the models the products and the
accumulator of an instruction are added exactly, or are aligned on the largest, cut behind 24 bits and 0, 1
or 2 more, added, and the sum is cut to float32. A row is the largest error over all elements, divided by what
tests/kernels/float_error.py allows: above 1 the split would be refused.
"""

from __future__ import annotations

import numpy as np
import torch

STEP = 32  # terms between two additions outside of a matrix instruction
TERMS = (1, 4, 16, 32, 64, 128, 256, 1024)
BITS = (None, 2, 1, 0)
SHIFTS = (0.17, 1.0, 0.0)  # of the mean, in standard deviations


def tf32(x: np.ndarray, half: int) -> np.ndarray:
    """Rounded (half = 0x1000) or cut (0) to a TF32."""
    return ((x.view(np.uint32) + np.uint32(half)) & np.uint32(0xFFFFE000)).view(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def add(total: np.ndarray, a: np.ndarray, b: np.ndarray, terms: int, bits: int | None) -> np.ndarray:
    """total + a @ b by instructions of so many terms."""
    for start in range(0, a.shape[1], terms):
        products = a[:, start : start + terms, None].astype("f8") * b[None, start : start + terms].astype(
            "f8"
        )
        parts = np.concatenate([products, total[:, None].astype("f8")], axis=1)
        if bits is None:
            total = parts.sum(1).astype("f4")
            continue
        exponent = np.frexp(np.abs(parts).max(1, keepdims=True))[1]
        unit = np.ldexp(1.0, exponent - 24 - bits)
        whole = (np.trunc(parts / unit) * unit).sum(1)
        unit = np.ldexp(1.0, np.frexp(whole)[1] - 24)
        total = (np.trunc(whole / unit) * unit).astype("f4")
    return total


def three_tf32(x: np.ndarray, w: np.ndarray, bits: int | None) -> np.ndarray:
    large_x, large_w = tf32(x, 0x1000), tf32(w, 0x1000)
    total = np.zeros((len(x), w.shape[1]), "f4")
    for a, b in ((tf32(x - large_x, 0), large_w), (large_x, tf32(w - large_w, 0)), (large_x, large_w)):
        total = add(total, a, b, 8, bits)
    return total


def six_bfloat16(x: np.ndarray, w: np.ndarray, bits: int | None) -> np.ndarray:
    x1, w1 = bfloat16(x), bfloat16(w)
    x2, w2 = bfloat16(x - x1), bfloat16(w - w1)
    x3, w3 = bfloat16(x - x1 - x2), bfloat16(w - w1 - w2)
    total = np.zeros((len(x), w.shape[1]), "f4")
    for a, b in ((x2, w2), (x3, w1), (x1, w3), (x2, w1), (x1, w2), (x1, w1)):
        total = add(total, a, b, 16, bits)
    return total


def main() -> None:
    print("split, bits behind 24:", *(f"{terms:>7}" for terms in TERMS), "terms")
    for name, split in (("three TF32", three_tf32), ("six bfloat16", six_bfloat16)):
        for bits in BITS:
            worst = []
            for terms in TERMS:
                generator = np.random.default_rng(terms)
                found = []
                for shift in SHIFTS:
                    x, w = (
                        ((generator.standard_normal(shape) + shift) * 2.0 ** generator.integers(-3, 3, shape))
                        for shape in ((48, terms), (terms, 40))
                    )
                    x, w = x.astype("f4"), w.astype("f4")
                    exact = x.astype("f8") @ w.astype("f8")
                    plain = (torch.from_numpy(x) @ torch.from_numpy(w)).numpy()
                    total = np.zeros_like(plain)
                    for start in range(0, terms, STEP):
                        total = split(x[:, start : start + STEP], w[start : start + STEP], bits) + total
                    allowed = 2 * np.abs(plain - exact).max() + 2.0**-24 * np.abs(exact).max()
                    found.append(np.abs(total - exact).max() / allowed)
                worst.append(max(found))
            print(
                f"{name:>12}, {'exact' if bits is None else bits:>7}:", *(f"{value:7.2f}" for value in worst)
            )


if __name__ == "__main__":
    main()
