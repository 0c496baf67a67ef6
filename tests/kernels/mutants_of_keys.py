"""Faults to inject in the Triton kernels of keys and rows, and the ordinary checks that must find them.

A mutant is one edit, (old text, new text). Edits stay inside the buffers, so that what fails is a check.
"""

# ruff: noqa: E501 (an edit stands on the lines it has in the kernel)

import test_bounds_of_sums
import test_bucketize
import test_exact_gradients
import test_fixed_point
import test_gather_rows
import test_hash_table
import test_hash_table_erase
import test_hash_table_used
import test_intersect
import test_lazy_decay
import test_no_sync
import test_packed_rows
import test_padding
import test_philox
import test_schedules
import test_segment_sum
import test_sparse_optimizers
import test_unique
import test_unique_table
import torch
from mutate import each

IMPL = "triton"


def hidden_step():
    """A training step under `no_sync`, and two calls that would have read a value back."""
    test_no_sync.test_the_host_never_waits_in_a_step("extremes")
    for name in ("to_fixed_point", "from_fixed_point", "unique_count", "insert_free_rows"):
        test_no_sync.test_the_host_never_waits_in_one_call(name)


def interleaved(test, **arguments):
    """A test of `test_schedules` in blocks of two lanes, under a few schedules."""

    def check():
        with test_schedules.small_blocks():
            for seed in range(12):
                test.hypothesis.inner_test(**arguments, drawn=(seed, True, 2))

    return check


REPEATED = [5, *test_schedules.CLASHING[:4], 5, -1, 5, *test_schedules.CLASHING[:4], -1]
MANY = test_schedules.CLASHING[:12]


HASH = [
    lambda: test_hash_table_used.test_the_number_of_occupied_slots_is_kept(IMPL),
    *each(test_hash_table.test_every_key_is_legal, 0),
    lambda: test_hash_table.test_old_keys_keep_their_rows_and_new_ones_follow_in_order(IMPL),
    lambda: test_hash_table.test_collisions_fill_a_table_to_its_last_slot(IMPL),
    lambda: test_hash_table.test_probes_walk_their_step_and_wrap_around_the_end(IMPL, 3, 7),
    lambda: test_hash_table.test_a_full_table_refuses_and_is_left_as_it_was(IMPL),
    lambda: test_hash_table.test_growth_keeps_rows_and_leaves_the_old_table_alone(IMPL),
    lambda: (
        test_hash_table_erase.test_erasing_empties_a_slot_where_searches_end_and_leaves_a_tombstone_where_they_go_on(
            IMPL
        )
    ),
    lambda: test_hash_table_erase.test_the_leftover_of_a_key_beside_it_is_not_taken_for_it(IMPL),
    lambda: (
        test_hash_table_erase.test_an_insert_reuses_a_tombstone_but_only_for_a_key_that_is_not_further_down(
            IMPL
        )
    ),
    lambda: test_hash_table_erase.test_new_keys_take_free_rows_first(IMPL, torch.int64),
    lambda: test_hash_table_erase.test_assigning_changes_the_rows_of_present_keys(IMPL, torch.int64),
    lambda: test_padding.test_insert_takes_rows_for_the_keys_that_hold(IMPL, 4, 2),
    lambda: test_padding.test_find_assign_and_erase_pass_over_what_does_not_hold(IMPL),
    lambda: test_padding.test_a_refused_insert_says_so_in_the_status_and_keeps_the_first_code(IMPL),
]
TABLE = [
    *each(test_unique_table.test_the_matches_are_the_same, "skewed"),
    lambda: test_unique_table.test_a_table_has_the_position_of_every_distinct_key_once(IMPL),
    lambda: test_unique_table.test_a_table_of_other_keys_leads_to_no_other_memory(IMPL),
]
UNIQUE = [
    *TABLE,
    *each(test_unique.test_equals_a_dict, "extremes", "all_equal", "skewed", "repeat_at_end"),
    *each(test_unique.test_counts_around_a_block, 257),
    lambda: test_unique.test_keys_that_share_a_home_and_wrap_around_the_end(IMPL, True),
    *each(test_padding.test_unique, "extremes"),
]
INTERSECT = [
    *TABLE,
    test_padding.test_more_matches_than_room_write_nothing_outside,
    *each(test_intersect.test_equals_all_pairs, "left_longer", "right_longer"),
    lambda: test_intersect.test_keys_that_share_a_home_and_wrap_around_the_end(IMPL, 2**20 - 1),
    lambda: test_padding.check_intersect(torch.arange(-9, 9), torch.arange(4, -20, -1), 12, 20, IMPL),
]
BUCKETIZE = [
    *each(test_bucketize.test_counts_around_a_block, 1025),
    *each(test_bucketize.test_known_buckets_are_sorted, 1025),
    lambda: test_bucketize.test_one_owner_takes_all_and_equal_keys_stay_in_order(IMPL),
    *each(test_padding.test_bucketize, "extremes"),
]
SEGMENT_SUM = [
    *(
        lambda consistency=consistency, name=name: test_segment_sum.test_equals_the_reference(
            IMPL, consistency, name
        )
        for consistency in ("window", "batch")
        for name in ("odd_dim", "block_plus_one")
    ),
    *(
        lambda add=add, name=name, rows=rows: test_bounds_of_sums.test_terms(IMPL, add, name, rows)
        for add, name, rows in (
            (test_bounds_of_sums.by_key, "a bit more", 128),
            (test_bounds_of_sums.by_key, "a bit less", 128),
            (test_bounds_of_sums.by_rows, "at the end", 1),
            (test_bounds_of_sums.by_rows, "up to the end", 3),
        )
    ),
    *each(test_bounds_of_sums.test_values_are_rounded_on_both_sides_of_the_bound, 2),
    lambda: test_segment_sum.test_accumulates_into_a_view_and_nothing_else(IMPL, "batch"),
    lambda: test_segment_sum.test_a_sum_that_leaves_int64_is_an_error(IMPL, torch.float32, 1),
    lambda: test_segment_sum.test_a_value_without_a_fixed_point_number_is_an_error(IMPL, float("nan")),
    *each(test_padding.test_sums_are_of_the_occurrences_that_hold, 7),
    *(
        lambda name=name, padded=padded: test_segment_sum.test_segments_of_any_length_are_added_up_in_parts(
            IMPL, name, padded, None
        )
        for name, padded in (
            ("across_them", False),
            ("at_the_ends_of_parts", True),
            ("with_empty_ones", True),
        )
    ),
]
ROWS = [
    lambda: test_gather_rows.test_gather_moves_the_bits(IMPL, 7, 17, 129),
    lambda: test_gather_rows.test_scatter_moves_the_bits_and_nothing_else(IMPL, 33, 129),
    lambda: test_gather_rows.test_scatter_moves_the_bits_and_nothing_else(IMPL, 17, 127),
    lambda: test_gather_rows.test_scatter_from_rows_moves_the_bits_and_nothing_else(IMPL, 33, 1, 129),
    lambda: test_gather_rows.test_scatter_from_rows_moves_the_bits_and_nothing_else(IMPL, 17, 40, 127),
    lambda: test_gather_rows.test_rows_lie_further_apart_than_32_bits_count(IMPL),
    *each(test_padding.test_rows_move_where_they_hold, 5),
]
SPARSE = [
    *(
        lambda name=name: test_sparse_optimizers.test_equals_the_reference(IMPL, name, 17)
        for name in test_sparse_optimizers.OPTIMIZERS
    ),
    *(
        lambda name=name: test_sparse_optimizers.test_weight_decay_equals_the_reference_and_counts(IMPL, name)
        for name in ("sgd", "rowwise_adagrad", "adamw")
    ),
    *(
        lambda name=name: test_sparse_optimizers.test_a_large_eps_counts(IMPL, name)
        for name in ("rowwise_adagrad", "adam")
    ),
    *(
        lambda name=name: test_sparse_optimizers.test_row_counts_around_a_tile(IMPL, name, 33)
        for name in ("sgd", "adam")
    ),
    lambda: test_padding.test_updates_touch_the_rows_that_hold(IMPL, "adam", 5),
    lambda: test_lazy_decay.test_a_row_touched_late_has_the_bits_of_one_touched_in_every_update(IMPL, 5),
    lambda: test_lazy_decay.test_a_row_begins_with_its_first_update(IMPL),
    lambda: test_lazy_decay.test_a_row_that_was_updated_later_is_left_as_it_is(IMPL, 8.0),
]
PHILOX = [
    *each(test_philox.test_initial_rows_equal_the_reference, 5),
    lambda: test_philox.test_random_indices_equal_the_reference(IMPL, 100003, 5),
]
FIXED_POINT = [
    lambda: test_fixed_point.test_ties_go_to_even(IMPL),
    *each(test_fixed_point.test_a_value_without_a_number_is_named, 2.0**26),
    lambda: test_fixed_point.test_the_first_of_several_is_named(IMPL),
    *each(test_fixed_point.test_from_fixed_point_equals_the_reference, -7.5),
    lambda: test_exact_gradients.test_the_norm_adds_the_terms_of_its_weight_and_bias(
        IMPL, (21, 4), True, 0.4
    ),
    lambda: test_exact_gradients.test_no_sum_wraps(IMPL, -1),
    *each(test_bounds_of_sums.test_gradients_of_a_norm, 1),
    *each(test_bounds_of_sums.test_gradients_of_a_linear_layer, 1),
    lambda: test_bounds_of_sums.test_the_bound_is_the_largest_power_of_two_that_is_safe(36),
]
PACKED = [
    *each(test_packed_rows.test_a_width_is_the_smallest_that_holds_a_row, 65),
    lambda: test_packed_rows.test_equals_the_reference(IMPL, 9, 65),
    lambda: test_packed_rows.test_equals_the_reference(IMPL, 33, 130),
    lambda: test_packed_rows.test_views_of_wider_buffers_and_nothing_else(IMPL),
    *each(test_packed_rows.test_a_sum_that_leaves_int64_is_an_error, 1),
    *(
        lambda name=name, rows=rows: test_bounds_of_sums.test_terms(
            IMPL, test_bounds_of_sums.by_packed_rows, name, rows
        )
        for name, rows in (
            ("a bit more", 128),
            ("a bit less", 128),
            ("a bit more in 24 bits", 128),
            ("too much before the last", 3),
            ("at the end", 1),
            ("up to the end", 3),
        )
    ),
]
CHECKS = {
    "hash_table.triton_hash_table": HASH,
    "triton_scratch": [*UNIQUE, *INTERSECT],
    "unique.triton_unique": UNIQUE,
    "intersect.triton_intersect": INTERSECT,
    "bucketize.triton_bucketize": BUCKETIZE,
    "rows.triton_segment_sum": SEGMENT_SUM,
    "rows.triton_walks": SEGMENT_SUM,
    "packed_rows.triton_packed_rows": PACKED,
    "rows.triton_rows": ROWS,
    "sparse_optimizers.triton_sparse_optimizers": SPARSE,
    "philox.triton_philox": PHILOX,
    "fixed_point.triton_fixed_point": FIXED_POINT,
}
CLAIM = 'previous = tl.atomic_cas(slot_rows_ptr + slot, tl.where(trying, seen, -3), row, sem="relaxed")'
PLAIN_CLAIM = """previous = tl.load(slot_rows_ptr + slot, mask=trying, other=-3)
        tl.store(slot_rows_ptr + slot, row, mask=trying & (previous == seen))"""
BUILD = 'previous = tl.atomic_cas(holders_ptr + slot, tl.where(open_slot, -1, -2), position, sem="relaxed")'
PLAIN_BUILD = """previous = tl.load(holders_ptr + slot, mask=open_slot, other=-2)
            tl.store(holders_ptr + slot, position, mask=open_slot & (previous == -1))"""
COUNT = 'tl.atomic_add(counts_ptr + rank, tl.full((BLOCK,), 1, tl.int32), mask=inside, sem="relaxed")'
PLAIN_COUNT = """times = tl.load(counts_ptr + rank, mask=inside, other=0)
    tl.store(counts_ptr + rank, times + 1, mask=inside)"""
LEAST = 'tl.atomic_min(holders_ptr + slot, position, mask=inside & (position < settled), sem="relaxed")'
PLAIN_LEAST = "tl.store(holders_ptr + slot, position, mask=inside & (position < settled))"
MOST = 'tl.atomic_max(holders_ptr + slot, position, mask=inside, sem="relaxed")'
STABLE = "place = start + tl.cumsum(mine.to(tl.int64), axis=0) - 1"
UNSTABLE = "place = start + tl.sum(mine.to(tl.int64), axis=0) - tl.cumsum(mine.to(tl.int64), axis=0)"

SMALL_PARTS = "PART = 128", "PART = 4"
NO_ATOMICS = "dispatch.has_int64_atomics(out)", "False"
MUTANTS = {
    "hash_table.triton_hash_table": {
        "probe_stops_early": [("& (visit < num_groups):", "& (visit < 1):")],
        "step_even": [("((hashed >> 32) | 1)", "((hashed >> 32) & -2)")],
        "step_of_one": [("((hashed >> 32) | 1)", "((hashed >> 63) | 1)")],
        "home_of_the_key": [("group = hashed & (num_groups - 1)", "group = key & (num_groups - 1)")],
        "lost_insert": [("pending = pending & (won == 0)", "pending = pending & (trying == 0)")],
        "rows_in_order_of_keys": [
            ("number = torch.cumsum(wanted, 0)", "number = torch.cumsum(wanted, 0)[keys.argsort().argsort()]")
        ],
        "rejected_keys_counted": [("used += new - refused", "used += new")],
        "erased_keys_not_counted": [("used -= (rows >= 0).sum()", "used -= 0")],
        "free_rows_off_by_one": [("reused = free_rows[(number - 1)", "reused = free_rows[number")],
        "tombstone_as_empty": [("tl.max((slot_row == -1).to(tl.int32)", "tl.max((slot_row < 0).to(tl.int32)")],
        "tombstone_not_left": [("new_row = tl.where(ends_here, -1, -2)", "new_row = tl.where(ends_here, -1, -1)")],
        "leftover_key_found": [("(slot_key == key[:, None]) & (slot_row >= 0)", "(slot_key == key[:, None])")],
        "last_slot_of_a_group_skipped": [("leave = lane >= 7", "leave = lane >= 6")],
        "key_not_written": [("tl.store(slot_keys_ptr + slot, key, mask=won)", "")],
        "refusal_ignored": [("wanted &= fits", "wanted &= True")],
        "capacity_off_by_one": [("+ new <= slot_rows.numel()", "+ new < slot_rows.numel()")],
        "count_ignored": [("num_valid(num_keys, count_ptr)", "num_keys")],
        "padding_inserted": [("wanted &= ~padding(keys.numel(), count)", "pass")],
        "claim_without_atomic": [(CLAIM, PLAIN_CLAIM)],
    },
    "triton_scratch": {
        "build_without_atomic": [(BUILD, PLAIN_BUILD)],
        "table_is_not_a_ring": [("slot = (slot + 1) & (num_slots - 1)", "slot = tl.minimum(slot + 1, num_slots - 1)")],
        "lookup_stops_early": [("pending = occupied & (holder_key != key)", "pending = occupied & (visit < 0)")],
        "count_ignored": [("num_valid(num_keys, count_ptr)", "num_keys")],
        "last_occurrence": [(LEAST, MOST)],
        "table_trusted": [(" & (holder < num_table_keys)", "")],
    },
    "unique.triton_unique": {
        "first_occurrence_not_counted": [("mask=inside, sem=", "mask=inside & (representative != offsets), sem=")],
        "count_without_atomic": [(COUNT, PLAIN_COUNT)],
        "dropped_block": [
            ("inside = representative >= 0", "inside = (representative >= 0) & (offsets // BLOCK != 1)")
        ],
        "padding_of_the_inverse": [("mask=inside, other=0) - 1", "mask=inside, other=1) - 1")],
        "padding_not_zeroed": [
            ("tl.store(unique_ptr + offsets, tl.zeros((BLOCK,), tl.int64), mask=offsets < num_keys)", "pass")
        ],
        "counts_not_zeroed": [
            ("tl.store(counts_ptr + offsets, tl.zeros((BLOCK,), tl.int32), mask=offsets < num_keys)", "pass")
        ],
        "number_of_the_first_block": [("mask=offsets == num_keys - 1)", "mask=offsets == tl.minimum(num_keys - 1, 9))")],
        "table_of_positions": [("tl.store(table_ptr + slot, rank, mask=is_first)", "")],
    },
    "intersect.triton_intersect": {
        "position_off_by_one": [("tl.store(left_ptr + place, offsets,", "tl.store(left_ptr + place, offsets + 1,")],
        "dropped_last_match": [("(place < length)", "(place < length - 1)")],
        "dropped_block": [("listed = (matched >= 0)", "listed = (offsets // BLOCK != 1) & (matched >= 0)")],
        "left_for_right": [("tl.store(right_ptr + place, matched", "tl.store(right_ptr + place, offsets")],
        "counts_swapped": [
            ("build(right, right_count)", "build(right, left_count)"),
            ("table.contiguous(), left_count)", "table.contiguous(), right_count)"),
        ],
        "padding_not_marked": [("mask=behind)", "mask=behind & (offsets < 0))")],
        "too_many_counted": [("tl.minimum(tl.load(rank_ptr + num_keys - 1), length)", "tl.load(rank_ptr + num_keys - 1)")],
        "given_table_ignored": [("if table is None or table.numel() == 0:", "if True:")],
    },
    "bucketize.triton_bucketize": {
        "unstable": [(STABLE, UNSTABLE)],
        "lost_count": [("tl.sum((found == bucket)", "tl.sum(((found == bucket) & (offsets > 0))")],
        "low_half_of_the_hash": [("((mix64(key) >> 32) & 0xFFFFFFFF)", "(mix64(key) & 0xFFFFFFFF)")],
        "padding_has_owners": [("num_valid(num_keys, count_ptr)", "num_keys")],
    },
    "rows.triton_segment_sum": {
        "dropped_tile": [("triton.cdiv(dim, block))", "max(1, dim // block))")],
        "unstable_order": [
            (
                "keys, order = torch.sort(segments, stable=True)",
                "keys, order = torch.sort(segments.flip(0), stable=True); order = len(segments) - 1 - order",
            )
        ],
        "starts_from_zero": [("return tl.load(out_ptr, mask=owned, other=0), owned", "return tl.load(out_ptr, mask=owned, other=0) * 0, owned")],
        "checked_from_zero": [("total, owned = sum_before(to, mine, column, dim)\n                total", "total = total * 0\n                total")],
        "sums_before_are_not_looked_at": [("any_of(far | loud)", "any_of(loud)")],
        "terms_are_not_looked_at": [("any_of(far | loud)", "any_of(far)")],
        "padding_added": [("if count is not None:", "if False:")],
        "first_rows_twice": [SMALL_PARTS, ("tl.maximum(row, start + PART)", "row")],
        "parts_overlap": [SMALL_PARTS, ("tl.where(beyond, row, start) + PART)", "tl.where(beyond, row, start) + 2 * PART)")],
        "atomics_lost": [SMALL_PARTS, ("add_atomically(out_ptr, total, occurrence * dim + column, inside)", "worst")],
        "parts_lost": [SMALL_PARTS, NO_ATOMICS, ("torch.cat([bad, *add_parts(out, parts, grouped)])", "bad")],
        "last_part_lost": [SMALL_PARTS, ("triton.cdiv(rows, PART) if", "rows // PART if")],
        "sums_of_the_segment_before": [SMALL_PARTS, NO_ATOMICS, ("(start + scale - 1) // scale", "start // scale")],
        "sums_of_the_next_segment": [SMALL_PARTS, NO_ATOMICS, ("(stop + scale - 1) // scale", "stop // scale + 1")],
        "every_sum_begins_a_segment": [SMALL_PARTS, NO_ATOMICS, ("beyond | (start == row)", "beyond | (start <= row)")],
    },
    "rows.triton_walks": {
        "dropped_occurrence": [("for i in range(begin, end):", "for i in range(begin + 1, end):")],
        "wraps_around": [("fits = fits & (((total ^ after) & (term ^ after)) >= 0)", "fits = fits")],
        "forgives_what_does_not_fit": [("tl.where(fits, NONE,", "tl.where(fits | True, NONE,")],
        "a_bit_more_of_terms": [("CALM_BITS = tl.constexpr(55)", "CALM_BITS = tl.constexpr(56)")],
        "a_bit_more_of_values": [("magnitude(near)", "magnitude(2.0 * near)")],
        "the_last_row_is_looked_at": [("tl.maximum(most, magnitude(value))", "magnitude(value)"), ("most |= bits_of_size(value)", "most = bits_of_size(value)")],
        "negative_terms_are_not_looked_at": [("terms ^ (terms >> 63)", "tl.maximum(terms, 0)")],
    },
    "packed_rows.triton_packed_rows": {
        "no_room_for_the_sign": [("(8 * plane - 1)", "(8 * plane)")],
        "a_byte_for_zeros": [("(some != 0)", "(some == some)")],
        "last_columns_alone": [("span |= x ^ sign", "span = x ^ sign")],
        "twenty_three_bits": [("(size >> 24) & 0xFFFFFFFFFF", "(size >> 23) & 0x1FFFFFFFFFF")],
        "twenty_five_bits": [("(size >> 24)", "(size >> 25)")],
        "magnitude_of_the_least": [("((size >> 24) & 0xFFFFFFFFFF)", "(size >> 24)")],
        "float_where_an_integer_is_as_short": [("(width > 4) & exact", "(width > 3) & exact")],
        "rounded": [("(width > 4) & exact", "(width > 4)")],
        "integer_for_a_float": [("tl.where((width < 0)[:, None], bits, x)", "x")],
        "high_byte_first": [("(x >> (8 * plane))", "(x >> (56 - 8 * plane))")],
        "elements_side_by_side": [("place += dim", "place += 1")],
        "last_plane_dropped": [("mask=planes > plane)", "mask=planes > plane + 1)")],
        "rows_overlap": [("return ends - sizes,", "return (ends - sizes) // 2,")],
        "sign_not_extended": [("(bits << unused) >> unused", "bits")],
        "float_for_an_integer": [("floats.to(tl.int64), (bits", "bits, (bits")],
        "dropped_tile": [("triton.cdiv(dim, block))", "max(1, dim // block))")],
        "dropped_occurrence": [("for i in range(begin, end):", "for i in range(begin + 1, end):")],
        "checked_from_zero": [("total, owned = sum_before(to, mine, column, dim)\n            bad", "total = total * 0\n            bad")],
        "sums_before_are_not_looked_at": [("any_of(far | ", "any_of(")],
        "a_bit_more_of_floats": [("(127 + 55) << 23", "(127 + 56) << 23")],
        "wide_rows_are_calm": [(" | (widest > CALM_PLANES)", "")],
        "the_last_row_is_looked_at": [("tl.maximum(most, size)", "size")],
    },
    "rows.triton_rows": {
        "one_column_too_many": [("(columns < dim)", "(columns <= dim)")],
        "one_column_too_few": [("(columns < dim)", "(columns < dim - 1)")],
        "one_row_too_many": [("inside = (moves < valid)", "inside = (moves <= valid)")],
        "offsets_of_32_bits": [
            ("source_row[:, None] * source_row_stride", "(source_row[:, None] * source_row_stride).to(tl.int32)")
        ],
        "padding_not_zeroed": [("inside = (moves < num_moves)", "inside = (moves < valid)")],
        "offsets_of_32_bits_at_the_destination": [
            ("destination_row[:, None] * destination_row_stride", "(destination_row[:, None] * destination_row_stride).to(tl.int32)")
        ],
        "rows_of_the_source_ignored": [("    if GATHER:\n", "    if GATHER and not SCATTER:\n")],
        "rows_of_the_destination_ignored": [("    if SCATTER:\n", "    if SCATTER and not GATHER:\n")],
        "padding_scattered": [("    if not SCATTER:\n", "    if GATHER:\n")],
    },
    "sparse_optimizers.triton_sparse_optimizers": {
        "row_wise_without_eps": [("divisor = tl.sqrt_rn(second) + eps", "divisor = tl.sqrt_rn(second)")],
        "adagrad_without_eps": [("(rate * gradient, tl.sqrt_rn(second) + eps)", "(rate * gradient, tl.sqrt_rn(second))")],
        "adam_without_eps": [("(rate * first, tl.sqrt_rn(second) + eps)", "(rate * first, tl.sqrt_rn(second))")],
        "row_state_not_written": [("tl.store(second_ptr + row * second_stride, second, mask=inside)", "pass")],
        "first_not_written": [("        tl.store(first_place, first, mask=mask)\n    if", "        pass\n    if")],
        "second_not_written": [("tl.store(second_place, second, mask=mask)", "pass")],
        "squares_not_squared": [("rest2 * (gradient * gradient)", "rest2 * gradient")],
        "nesterov_without_momentum": [("rate * (gradient + beta1 * first)", "rate * first")],
        "norms_ignored": [("rate * tl.div_rn(of_weight, of_other)", "rate + 0 * of_other")],
        "l1_ignored": [("tl.where(first > beta1, beta1,", "tl.where(first > beta1, 0.0,")],
        "decay_of_the_change": [("weight = weight * decay\n    if first_ptr", "gradient = gradient * decay\n    if first_ptr")],
        "mean_square_without_weight_decay": [("if L2:\n            place", "if False:\n            place")],
        "missed_updates_forgotten": [("done = tl.where(last >= 1, done, step - 1)", "done = tl.zeros_like(done) + step - 1")],
        "one_update_too_many": [("update >= done", "update >= done - 1")],
        "last_update_not_written": [("tl.store(last_update_ptr + row * last_update_stride, tl.zeros((ROWS, 1), tl.float32) + step, mask=inside)", "pass")],
        "sum_for_mean": [("tl.full((ROWS, 1), 0.0, tl.float32) + dim)", "tl.full((ROWS, 1), 1.0, tl.float32))")],
        "wrong_sign": [("weight - change", "weight + change")],
        "second_tile_dropped": [("triton.cdiv(num_rows, rows)", "max(1, num_rows // rows)")],
        "padding_updated": [("num_valid(num_rows, count_ptr)", "(num_rows + 0)"), ("mask=inside, other=0)\n    return", "mask=inside, other=0) % 9\n    return")],
    },
    "philox.triton_philox": {
        "nine_rounds": [("tl.static_range(10)", "tl.static_range(9)")],
        "high_half_of_the_key": [("high_word(key + zero)", "high_word(zero)")],
        "same_words_in_every_block": [("low_word(tag + block + zero)", "low_word(tag + zero)")],
        "words_swapped": [("signed_unit(w1)", "signed_unit(w2)")],
        "bound_by_remainder": [
            ("((word.to(tl.uint64) * upper.to(tl.uint64)) >> 32)", "(word.to(tl.uint64) % upper.to(tl.uint64))")
        ],
    },
    "fixed_point.triton_fixed_point": {
        "truncated": [("((scaled + magic) - magic)", "scaled")],
        "limit_fits": [("tl.abs(values) < limit", "tl.abs(values) <= limit")],
        "last_bad_one": [("tl.min(tl.where(fits, NONE, position), axis=0)", "tl.max(tl.where(fits, 0, position), axis=0) + tl.min(tl.where(fits, NONE, 0), axis=0)")],
        "divided_in_float32": [("sums.to(tl.float64) * unit / divisor", "(sums.to(tl.float64) * unit).to(tl.float32) / divisor")],
        "sums_of_other_programs_lost": [('before = tl.atomic_add(to, term, mask=mask, sem="relaxed")', "before = tl.load(to, mask=mask, other=0) * 0\n    tl.store(to, term, mask=mask)")],
        "room_for_any_sum": [("(sums ^ (sums << 1)) < 0", "sums != sums")],
        "a_bit_less_room": [("(sums ^ (sums << 1)) < 0", "(sums < -(2**62)) | (sums > 2**63 - 2)")],
        "infinity_is_small": [("& 0x7FFFFFFF", "& 0x7F7FFFFF")],
        "negative_values_are_small": [(" & 0x7FFFFFFF", "")],
        "a_bit_more_of_values": [("NEAR_BITS = 51", "NEAR_BITS = 52")],
        "atomic_sum_wraps": [("wraps = mask & (((before ^ after) & (term ^ after)) < 0)", "wraps = mask & (before < before)")],
    },
}  # fmt: skip
# An edit of the host code or of an atomic, with the check that is made for it.
SPECIAL = {
    "unique_length_read_back": (
        "unique.triton_unique",
        [("    if not padded:\n", "    if num_unique.item() and not padded:\n")],
        hidden_step,
    ),
    "intersect_by_nonzero": (
        "intersect.triton_intersect",
        [("rank = torch.cumsum(matched >= 0, 0)", "rank = torch.cumsum(matched >= 0, 0); torch.nonzero(matched)")],
        hidden_step,
    ),
    "insert_asks_whether_it_fits": (
        "hash_table.triton_hash_table",
        [("wanted &= fits", "wanted &= bool(fits)")],
        hidden_step,
    ),
    "divisor_copied_to_the_device": (
        "fixed_point.triton_fixed_point",
        [("torch.full((1,), divisor, dtype=torch.float64, device=sums.device)", "torch.tensor([divisor], dtype=torch.float64, device=sums.device)")],
        hidden_step,
    ),
    "sum_read_back": ("fixed_point.triton_fixed_point", [("first = bad.min()", "first = torch.tensor(bad.min().item())")], hidden_step),
    "claimed_by_the_first_to_come": (
        "triton_scratch",
        [(LEAST, "pass")],
        interleaved(test_schedules.test_unique, keys=REPEATED),
    ),
    "minimum_without_atomic": (
        "triton_scratch",
        [(LEAST, PLAIN_LEAST)],
        interleaved(test_schedules.test_unique, keys=REPEATED),
    ),
    "holder_without_atomic": (
        "triton_scratch",
        [(BUILD, PLAIN_BUILD)],
        interleaved(test_schedules.test_intersect, left=MANY[2:], right=MANY),
    ),
    "slot_without_atomic": (
        "hash_table.triton_hash_table",
        [(CLAIM, PLAIN_CLAIM)],
        interleaved(test_schedules.test_hash_table, batches=[MANY], erased=MANY[3:6]),
    ),
}  # fmt: skip
