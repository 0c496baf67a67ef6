"""Faults to inject in the Triton kernels of dense layers and attention, as in `mutants_of_keys`."""

# ruff: noqa: E501 (an edit stands on the lines it has in the kernel)

from functools import lru_cache

import attention_cases
import test_bounds_of_sums
import test_exact_gradients
import test_linear
import test_norm_mul_dropout
import test_relative_aggregate
import test_sampled_softmax
import test_silu
import test_softmax_attention
from mutate import each

IMPL = "triton"


# Every mask and bias on two sequences of a few blocks; and one long enough that two programs walk the same rows.
OPTIONS = [35, 0, 18], [4, 0, 5], [3, 0, 2], (3, 9, 6, 5), None, "two", ""
LONG = [85], None, None, (1, 0, 0, 0), None, "", ""


@lru_cache
def attention_case(long):
    """Tensors and call, with plain and exact results."""
    tensors, call = attention_cases.make(*(LONG if long else OPTIONS), dims=(1, 8, 6))
    doubled = attention_cases.doubled
    run = attention_cases.run
    exact = run("reference", doubled(tensors), type(call)(*doubled(call)))
    return tensors, call, run("reference", tensors, call), exact


def attention(long=False, **changes):
    tensors, call, plain, exact = attention_case(long)
    got = attention_cases.run(IMPL, tensors, call._replace(**changes))
    attention_cases.judge(tensors, call, got, plain, exact)


def long_attention():
    attention(long=True, deterministic=False)


SILU = [lambda: test_silu.test_error_is_that_of_plain_float32(IMPL, (7, 13))]
LINEAR = [
    *each(test_linear.test_error_is_that_of_plain_float32, "odd_dim"),
    lambda: test_linear.test_weight_gradient_error_is_that_of_plain_float32(IMPL),
    lambda: test_linear.test_a_sum_never_wraps(IMPL, 1),
    lambda: test_linear.test_programs_that_share_samples_add_up(IMPL, "single_tokens", True, None),
    lambda: test_exact_gradients.test_a_linear_layer_adds_the_gradient_of_its_bias(IMPL, (70, 33, 34)),
    lambda: test_exact_gradients.test_no_sum_wraps(IMPL, 1),
    *each(test_bounds_of_sums.test_gradients_of_a_linear_layer, 1, 33),
    lambda: test_bounds_of_sums.test_the_bias_of_a_linear_layer_alone(IMPL, 1),
    lambda: test_bounds_of_sums.test_the_bound_of_a_linear_layer_falls_with_its_samples(),
]
NORM = [
    lambda: test_bounds_of_sums.test_gradients_of_a_norm_with_large_terms_of_the_bias_alone(IMPL, 1),
    lambda: test_norm_mul_dropout.test_error_is_that_of_plain_float32(IMPL, "odd_dim", True, True),
    lambda: test_norm_mul_dropout.test_the_mask_depends_on_seed_sample_and_position_alone(IMPL),
    lambda: test_exact_gradients.test_the_norm_adds_the_terms_of_its_weight_and_bias(
        IMPL, (21, 4), True, 0.4
    ),
    lambda: test_exact_gradients.test_no_sum_wraps(IMPL, -1),
    *each(test_bounds_of_sums.test_gradients_of_a_norm, 9),
    *each(
        test_bounds_of_sums.test_gradients_beyond_the_bound_are_those_of_the_terms, (False, 0.0), (True, 0.4)
    ),
]
SOFTMAX = [
    *each(test_sampled_softmax.test_error_is_that_of_plain_float32, "odd_dim"),
    lambda: test_sampled_softmax.test_a_negative_that_is_not_valid_counts_for_nothing(IMPL),
    lambda: test_sampled_softmax.test_large_scores_neither_overflow_nor_vanish(IMPL),
]
ATTENTION = [
    lambda: test_softmax_attention.test_weights_are_written_out(IMPL),
    *each(
        test_softmax_attention.test_error_is_that_of_plain_float32,
        "odd_dim",
        "padded_right",
        "other_keys_causal",
    ),
    lambda: test_softmax_attention.test_dropout_keeps_the_same_weights_everywhere(IMPL),
    *each(test_softmax_attention.test_error_is_that_of_plain_float32, "block_plus_one"),
]
RELATIVE = [
    lambda: test_relative_aggregate.test_buckets_are_written_out(IMPL),
    *each(test_relative_aggregate.test_error_is_that_of_plain_float32, "odd_dim", "table_too_short"),
]
CHECKS = {
    "silu.triton_silu": SILU,
    "linear.triton_linear": LINEAR,
    "norm_mul_dropout.triton_norm": NORM,
    "sampled_softmax.triton_softmax": SOFTMAX,
    "relative_aggregate.triton_relative": RELATIVE,
    "softmax_attention.triton_softmax_attention": ATTENTION,
    "hstu_attention.triton_forward": [attention],
    "hstu_attention.triton_backward": [attention],
    "hstu_attention.triton_mask": [attention],
}
SLOPE = "return s * (1.0 + x * (1.0 - s))"

SMALL_SHARES = "TOKENS_OF_SHARE = 512", "TOKENS_OF_SHARE = 8"

MUTANTS = {
    "silu.triton_silu": {
        "half_of_x": [("tl.div_rn(x, 1.0 + exp(-x))", "x * 0.5")],
        "silu_of_half": [("tl.div_rn(x, 1.0 + exp(-x))", "tl.div_rn(x * 0.5, 1.0 + exp(-x * 0.5))")],
        "slope_without_its_second_term": [("s * (1.0 + x * (1.0 - s))", "s")],
        "last_element_dropped": [("mask=place < length)", "mask=place < length - 1)")],
    },
    "linear.triton_linear": {
        "dropped_tile": [("range(tl.full((), 0, tl.int64), inner, TERMS)", "range(TERMS, inner, TERMS)")],
        "lost_sample": [("for sample in range(begin, end)", "for sample in range(begin + 1, end)")],
        "tokens_of_the_next_sample": [("(token < stop)", "(token <= stop)")],
        "no_bias": [("if bias_ptr is not None:", "if False:")],
        "wraps_around": [("fits = fits & (((total ^ after) & (term ^ after)) >= 0)", "fits = fits")],
        "carry_of_the_bias_lost": [("axis=1) + (low >> 32)", "axis=1)")],
        "block_of_the_bias_wraps": [("(high >= -(2**31)) & (high < 2**31) & ", "")],
        "every_share_has_all_samples": [SMALL_SHARES, ("begin = share * samples_of_share", "begin = share * 0"), ("begin + samples_of_share, samples", "samples, samples")],
        "sums_of_other_shares_lost": [SMALL_SHARES, ("wraps = add_atomically(to, total, behind", "tl.store(to, total, mask=inside)\n        wraps = add_atomically(to, total * 0, behind")],
        "sums_before_are_not_looked_at": [("any_of(loud | (most >= magnitude(near)))", "any_of(most >= magnitude(near))")],
        "products_are_not_looked_at": [("any_of(loud | (most >= magnitude(near)))", "any_of(loud)")],
        "tokens_are_not_looked_at": [("any_of(most >= magnitude(near)) | any_of(is_far(before))", "any_of(is_far(before))")],
        "sums_of_the_bias_are_not_looked_at": [("any_of(most >= magnitude(near)) | any_of(is_far(before))", "any_of(most >= magnitude(near))")],
        "bound_of_one_sample": [("near(bits, max(shared))", "near(bits, 1)")],
        "bias_by_every_column": [("tl.where(last, tl.minimum(first_token + tokens_of_share, tokens), first_token)", "tl.minimum(first_token + tokens_of_share, tokens)")],
    },
    "norm_mul_dropout.triton_norm": {
        "missing_rstd": [("y = centred * rstd * weight + bias", "y = centred * weight + bias")],
        "mask_by_row": [("tl.load(samples_ptr + row), tl.load(positions_ptr + row)", "row, row")],
        "mask_by_sample": [("low_word(position + zero)", "low_word(zero)")],
        "kept_without_factor": [(">= threshold, factor, 0.0)", ">= threshold, 1.0, 0.0)")],
        "mean_of_slopes_lost": [("(slope - level)", "slope")],
        "variance_of_padding": [("centred = tl.where(inside, x - mean, 0.0)", "centred = x - mean")],
        "last_row_of_a_program_alone": [("bias_sum = add_near(bias_sum, g, limit)", "bias_sum = add_near(bias_sum * 0, g, limit)")],
        "last_checked_row_of_a_program_alone": [("after = total + term", "after = term")],
        "terms_of_the_weight_are_not_looked_at": [("tl.maximum(magnitude(g * normed), magnitude(g))", "magnitude(g)")],
        "terms_of_the_bias_are_not_looked_at": [("tl.maximum(magnitude(g * normed), magnitude(g))", "magnitude(g * normed)")],
        "checked_without_the_gate": [("g = g * u.to(tl.float32)", "g = g")],
    },
    "sampled_softmax.triton_softmax": {
        "label_twice": [("total = tl.full((), 1.0, tl.float32)", "total = tl.full((), 2.0, tl.float32)")],
        "invalid_counts": [("mask=item < count, other=0) != 0", "mask=item < count, other=0) >= 0")],
        "sum_not_rescaled": [("total = total * exp(most - higher)", "total = total")],
        "first_tile_dropped": [("range(tl.full((), 0, tl.int64), count, ITEMS)", "range(ITEMS, count, ITEMS)")],
        "label_without_slope": [("(tl.div_rn(exp(score_0 - most), total) - 1.0)", "tl.div_rn(exp(score_0 - most), total)")],
        "no_temperature": [("axis=1) * scale", "axis=1)")],
    },
    "relative_aggregate.triton_relative": {
        "bucket_off_by_one": [("bucket = query - key", "bucket = query - key + 1")],
        "power_of_two_in_the_bucket_below": [("large = (rest >> shift) > 0", "large = (rest >> shift) > 1")],
        "no_diagonal": [("column[None, :] <= row[:, None]", "column[None, :] < row[:, None]")],
        "dropped_tile": [("for start in range(first, length, BLOCK_N):", "for start in range(first + BLOCK_N, length, BLOCK_N):")],
        "last_bucket_alone": [("tl.where(first + ENTRIES >= buckets, 0, lowest)", "lowest")],
    },
    "softmax_attention.triton_softmax_attention": {
        "next_key_seen": [("(column <= row)", "(column <= row + 1)")],
        "no_bias": [("s = s + tl.load(bias_ptr + place", "ignored = s + tl.load(bias_ptr + place")],
        "sum_not_rescaled": [("total = total * shrink", "total = total")],
        "output_not_rescaled": [("acc = acc * shrink[:, None]", "acc = acc")],
        "heads_draw_alike": [("seed + (head.to(tl.int64) << 32)", "seed + head.to(tl.int64) * 0")],
        "slope_not_dropped": [("slope = slope * kept", "slope = slope")],
        "weight_not_dropped": [("weight = p * kept", "weight = p")],
        "along_lost": [("ds = p * (slope - along[:, None])", "ds = p * slope")],
        "dropped_tile": [("for start in range(lowest, queries, BLOCK_N):", "for start in range(lowest + BLOCK_N, queries, BLOCK_N):")],
        "lost_dk_update": [("dk += tl.dot", "dk = tl.dot")],
    },
    "hstu_attention.triton_forward": {
        "no_normaliser": [("hidden) * scale)[:, None]", "hidden))[:, None]")],
        "half_of_x": [("p = x * sigmoid(x)", "p = x * 0.5")],
        "dropped_tile": [("for n in range(0, walk.count):", "for n in range(1, walk.count):")],
        "no_bias": [("x = add_bias(", "ignored = add_bias(")],
    },
    "hstu_attention.triton_backward": {
        "lost_dq_update": [("dq += product(", "dq = product(")],
        "lost_dk_update": [("dk += product(", "dk = product(")],
        "dropped_tile": [("for n in range(0, walk.count):", "for n in range(1, walk.count):")],
        "slope_without_its_second_term": [(SLOPE, "return s")],
        "no_normaliser": [("dv * scale,", "dv,")],
    },
    "hstu_attention.triton_mask": {
        "next_key_seen": [("(column <= row)", "(column <= row + 1)")],
        "no_diagonal": [("(column <= row)", "(column < row)")],
        "history_longer": [("high = tl.minimum(row + 1, history)\n    if rules.contextual is not None:\n        high = tl.where(row < contexts, history, high)\n    seen", "high = tl.minimum(row + 1, history + 1)\n    if rules.contextual is not None:\n        high = tl.where(row < contexts, history, high)\n    seen")],
        "window_longer": [("low = tl.where(hides, at - rules.window, 0)\n        seen", "low = tl.where(hides, at - rules.window - 1, 0)\n        seen")],
        "window_shorter": [("low = tl.where(hides, at - rules.window, 0)\n        seen", "low = tl.where(hides, at - rules.window + 1, 0)\n        seen")],
        "prefix_longer": [("(column < rules.prefix)", "(column <= rules.prefix)")],
        "one_full_row_less": [("((rules.full == 0) | (at < history - rules.full))", "((rules.full == 0) | (at <= history - rules.full))")],
        "one_context_more": [("high = tl.where(row < contexts, history, high)\n    seen", "high = tl.where(row <= contexts, history, high)\n    seen")],
        "group_begins_late": [("// rules.group * rules.group)\n    return", "// rules.group * rules.group + 1)\n    return")],
        "last_block_not_walked": [("cut_2 + stop_3 - start_3,", "cut_2,")],
    },
}  # fmt: skip
# An edit of the host code or of an atomic, with the check that is made for it.
SPECIAL = {
    "block_taken_for_whole": (
        "hstu_attention.triton_mask",
        [("(column_stop <= row + 1)", "(column_stop <= row + 16)")],
        long_attention,
    ),
    "lost_atomic_dq_update": (
        "hstu_attention.triton_backward",
        [('tl.atomic_add(address, dq, mask=mask, sem="relaxed")', "tl.store(address, dq, mask=mask)")],
        long_attention,
    ),
}  # fmt: skip
