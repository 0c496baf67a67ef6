# mypy: ignore-errors
"""Fields of text as numbers, in one pass over lines that are as plain as most logs' are.

What is written in another way than the patterns below is left to Arrow and `values`, which know every
spelling and name what is wrong. So a kernel takes nothing that could fail there, and gives the same numbers.
"""

import numpy as np

from tritonrec.kernels.caches import njit

SKIPPED, NUMBER, INTEGER, FLAG, COUNT, HEXADECIMAL = range(6)
"""Fields: any without a quote; -?[0-9]+(.[0-9]+)? of 15 digits; 0|-?[1-9][0-9]* of int64; 0|1; an integer or
nothing, which is 0; up to eight hexadecimal digits or nothing, which is `MISSING`."""
MISSING = 2**32
"""Id of a hexadecimal word that is missing."""
NEWLINE, RETURN, MINUS, POINT, ZERO = 10, 13, 45, 46, 48
ONE, TEN = np.uint64(1), np.uint64(10)
DIGITS = np.full(256, 255, np.uint8)
DIGITS[list(b"0123456789abcdef")] = DIGITS[list(b"0123456789ABCDEF")] = range(16)


@njit(cache=True, nogil=True)
def read_fields(text, delimiter, quote, kinds, columns, integers, floats):
    """The rows of lines of fields between delimiters, or -1 where something is written in another way.

    text (L,) uint8, whose last byte is a newline; delimiter (D,) uint8; quote: a byte, -1 for none; kinds,
    columns (F,) int64: of each field, and its row in the outputs; integers and floats are the same memory
    (K, rows) as int64 and as float64.
    """
    at, end, row, last = np.uint64(0), np.uint64(len(text)), 0, len(kinds) - 1
    while at < end:
        if text[at] == NEWLINE or (text[at] == RETURN and text[at + ONE] == NEWLINE):
            at += ONE if text[at] == NEWLINE else ONE + ONE
            continue
        for field in range(last + 1):
            kind, column, start = kinds[field], columns[field], at
            if kind == HEXADECIMAL:
                number = np.uint64(0)
                while DIGITS[text[at]] < 16:
                    number = number << np.uint64(4) | np.uint64(DIGITS[text[at]])
                    at += ONE
                if at - start > 8:
                    return -1
                integers[column, row] = number if at > start else MISSING
            elif kind == SKIPPED:
                while text[at] != delimiter[0] and text[at] != NEWLINE and text[at] != RETURN:
                    if text[at] == quote:
                        return -1
                    at += ONE
            else:
                number, negative, power = np.uint64(0), text[at] == MINUS, 1.0
                at += np.uint64(negative)
                begin = at
                while DIGITS[text[at]] < 10:
                    number = number * TEN + np.uint64(DIGITS[text[at]])
                    at += ONE
                digits = at - begin
                if kind == NUMBER:
                    if text[at] == POINT:
                        at += ONE
                        while DIGITS[text[at]] < 10:
                            number = number * TEN + np.uint64(DIGITS[text[at]])
                            at, power = at + ONE, power * 10
                    if not digits or at - begin > 16:
                        return -1
                    floats[column, row] = (-1.0 if negative else 1.0) * np.float64(number) / power
                else:
                    plain = digits > 0 and digits < 20 and number < np.uint64(2**63)
                    plain &= text[begin] != ZERO or (digits == ONE and not negative)
                    plain &= kind != FLAG or (number < 2 and not negative)
                    if not plain and (kind != COUNT or at > start):
                        return -1
                    integers[column, row] = -np.int64(number) if negative else np.int64(number)
            if field < last:
                for byte in delimiter:
                    if text[at] != byte:
                        return -1
                    at += ONE
        if text[at] == RETURN:
            at += ONE
        if text[at] != NEWLINE:
            return -1
        at += ONE
        row += 1
    return row


@njit(cache=True, nogil=True)
def read_hexadecimal(text, offsets, out):
    """out (n,) int64: the numbers of words of one to eight digits; the first other word's place, or n."""
    for row in range(len(out)):
        number, width = np.int64(0), offsets[row + 1] - offsets[row]
        if width < 1 or width > 8:
            return row
        for at in range(offsets[row], offsets[row + 1]):
            if DIGITS[text[at]] > 15:
                return row
            number = number << 4 | np.int64(DIGITS[text[at]])
        out[row] = number
    return len(out)
