"""Attentions that are wrong in one term: `judge` must find each of them out."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from attention_cases import RESULTS, doubled, judge, make, run

from tritonrec.kernels.hstu_attention import masks, op
from tritonrec.kernels.hstu_attention.call import Call


def with_mask(change):
    """The reference under a mask that `change` makes of (length, targets, contexts, mask)."""

    def attend(tensors, call, monkeypatch):
        right = masks.visible
        monkeypatch.setattr(op, "visible", lambda *arguments: change(right, *arguments))
        return run("reference", tensors, call)

    return attend


def with_rule(**steps):
    """The reference with numbers of the mask a step away."""

    def change(visible, length, targets, contexts, mask):
        numbers = {name: getattr(mask, name) + step for name, step in steps.items()}
        return visible(length, targets, contexts, replace(mask, **numbers))

    return with_mask(change)


def with_silu(of_score):
    """Attention with another function of the scores, forward and backward by autograd."""

    def attend(tensors, call, monkeypatch):
        do, *leaves = (tensor.clone() for tensor in tensors)
        for leaf in leaves:
            leaf.requires_grad_()
        out = torch.zeros(len(leaves[0]), *leaves[2].shape[1:])
        for b in range(call.num_sequences):
            sequence = op._Sequence(call, b, leaves[0])
            for h in range(do.shape[1]):
                s = sequence.scores(call, leaves[0], leaves[1], h)
                p = of_score(s) * sequence.scale
                out[sequence.rows, h] = p @ leaves[2][sequence.columns, h]
        return [out.detach(), *torch.autograd.grad(out, leaves, do), *run("reference", tensors, call)[4:]]

    return attend


def with_results(change):
    """Right results, one of them changed."""

    def attend(tensors, call, monkeypatch):
        results = run("cpu", tensors, call)
        change(dict(zip(RESULTS, results, strict=True)), tensors, call)
        return results

    return attend


def with_call(**changes):
    """The right attention, asked for something else."""

    def attend(tensors, call, monkeypatch):
        return run("cpu", tensors, call._replace(**{k: f(getattr(call, k)) for k, f in changes.items()}))

    return attend


def lost_update(results, tensors, call):
    """dq of 16 rows without the keys of one block of 16."""
    poked = [tensor.clone() for tensor in tensors]
    poked[3][16:32] = 0  # without these values no score gradient
    results["dq"][48:64] = run("cpu", poked, call)[1][48:64]


MUTANTS = {
    "half_of_x": with_silu(lambda s: s / 2),
    "silu_of_half": with_silu(lambda s: torch.nn.functional.silu(s / 2)),
    "relu": with_silu(torch.relu),
    "zero": with_silu(lambda s: 0 * s),
    "no_normaliser": with_call(scaling_seqlen=lambda n: 1),
    "own_length": with_call(scaling_seqlen=lambda n: n + 1),
    "alpha_twice": with_call(alpha=lambda a: a * a),
    "bias_times_alpha": with_call(alpha=lambda a: a, bias_factor=lambda f: f * 0.97),
    "window_longer": with_rule(max_attn_len=1),
    "window_shorter": with_rule(max_attn_len=-1),
    "more_full_rows": with_rule(min_full_attn_seq_len=1),
    "fewer_full_rows": with_rule(min_full_attn_seq_len=-1),
    "longer_prefix": with_rule(attn_prefix_len=1),
    "shorter_prefix": with_rule(attn_prefix_len=-1),
    "larger_groups": with_rule(target_group_size=1),
    "smaller_groups": with_rule(target_group_size=-1),
    "one_target_more": with_mask(lambda f, n, t, c, m: f(n, min(t + 1, n - c), c, m)),
    "one_target_less": with_mask(lambda f, n, t, c, m: f(n, max(t - 1, 0), c, m)),
    "one_context_less": with_mask(lambda f, n, t, c, m: f(n, t, max(c - 1, 0), m)),
    "no_diagonal": with_mask(lambda f, n, t, c, m: f(n, t, c, m) & ~torch.eye(n, dtype=torch.bool)),
    "later_keys": with_mask(lambda f, n, t, c, m: f(n, t, c, m) | torch.eye(n, dtype=torch.bool).roll(1, 1)),
    "dropped_tile": with_mask(
        lambda f, n, t, c, m: (
            f(n, t, c, m) & ~((torch.arange(n)[:, None] // 16 == 3) & (torch.arange(n) // 16 == 3))
        )
    ),
    "lost_dq_update": with_results(lost_update),
    "swapped_gradients": with_results(lambda r, t, c: r["dq"].copy_(r["dk"])),
    "table_of_a_neighbour": with_results(lambda r, t, c: r["dpos"].copy_(r["dpos"].roll(1, 0))),
    "bucket_off_by_one": with_results(lambda r, t, c: r["dts"].copy_(r["dts"].roll(1, 1))),
}

MUTATED = ([70, 0, 40], [5, 0, 7], [3, 0, 2], (3, 9, 6, 5), None, "two times", "")


@lru_cache
def mutated_case():
    tensors, call = make(*MUTATED)
    plain = run("reference", tensors, call)
    return tensors, call, plain, run("reference", doubled(tensors), Call(*doubled(call)))


def test_the_judge_lets_the_right_one_pass():
    tensors, call, plain, exact = mutated_case()
    judge(tensors, call, run("cpu", tensors, call), plain, exact)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_out(name, monkeypatch):
    tensors, call, plain, exact = mutated_case()
    with monkeypatch.context() as patch:
        got = MUTANTS[name](tensors, call, patch)
    with pytest.raises(AssertionError):
        judge(tensors, call, got, plain, exact)
