"""The modules as their formulas say, sample by sample, in their parameters' dtype: oracles in float64."""

import torch

from tritonrec import ops


def silu(x):
    return x * torch.sigmoid(x)


def linear(x, module):
    y = x @ module.weight.T
    return y if module.bias is None else y + module.bias


def mlp(x, module):
    return linear(silu(linear(x, module.inner)), module.outer)


def layer_norm(x, module):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + module.eps) * module.weight + module.bias


def rms_norm(x, module):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + module.eps) * module.weight


def attention(q, k, v, heads, normaliser, targets, bias=0):
    """One sample: (n, heads * size) each; the last `targets` rows do not see each other. bias (n, n)."""
    n = len(q)
    seen = [[j == i or (j < i and j < n - targets) for j in range(n)] for i in range(n)]
    mask = torch.tensor(seen, dtype=q.dtype).reshape(n, n)
    outs = []
    for a, b, c in zip(*(tensor.chunk(heads, 1) for tensor in (q, k, v)), strict=True):
        outs.append(silu(a @ b.T / a.shape[1] ** 0.5 + bias) * mask / normaliser @ c)
    return torch.cat(outs, 1)


def relative_bias(module, times, asked):
    """One sample (n, n): the weight of places back, and of powers of two of the time since."""
    n, last = len(times), len(module.ts_weights) - 1
    ago = [[max(1, int(asked[i]) - int(times[j])).bit_length() - 1 for j in range(n)] for i in range(n)]
    back = [[max(0, i - j) for j in range(n)] for i in range(n)]
    at = torch.tensor([ago, back], dtype=torch.int64).view(2, n, n)
    return module.ts_weights[at[0].clamp(max=last)] + module.pos_weights[at[1]]


def hstu_layer(x, module, targets=0, times=None, asked=None):
    """One sample (n, d), without dropout."""
    u, v, q, k = silu(linear(layer_norm(x, module.norm), module.uvqk)).split(module.sizes, 1)
    bias = 0 if module.bias is None else relative_bias(module.bias, times, asked)
    attended = attention(q, k, v, module.config.heads, module.config.max_seq_len, targets, bias)
    product = module.gate.norm_product
    gated = layer_norm(u * attended, module.gate) if product else u * layer_norm(attended, module.gate)
    return x + linear(gated, module.output)


def mmoe(x, module):
    """Row by row, with Python's own sort."""
    rows = [x.new_zeros(0, len(module.towers))]
    for row in x:
        logits = []
        for gate, tower in zip(module.gates, module.towers, strict=True):
            scores = linear(row, gate)
            chosen = sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))[: module.top_k]
            weights = torch.softmax(scores, 0)
            mixed = sum(weights[e] * mlp(row, module.experts[e]) for e in chosen)
            logits.append(mlp(mixed, tower))
        rows.append(torch.cat(logits)[None])
    return torch.cat(rows)


def relative(v, weight, heads, times=None):
    """One sample (n, heads * size): weights by relative position, or by the time since, in powers of two."""
    n, last = len(v), weight.shape[1] - 1
    buckets = torch.zeros(n, n, dtype=torch.int64)
    for i in range(n):
        for j in range(i + 1):
            bucket = i - j if times is None else max(1, int(times[i] - times[j])).bit_length() - 1
            buckets[i, j] = min(bucket, last)
    values = v.chunk(heads, 1)
    return torch.cat([row[buckets].tril() @ part for row, part in zip(weight, values, strict=True)], 1)


def fuxi_layer(x, module, times):
    """One sample (n, d), without dropout."""
    heads, rms = module.config.heads, module.config.norm == "rms"
    norm, gate_norm = (rms_norm, module.gate.norm) if rms else (layer_norm, module.gate)
    u, v, q, k = silu(linear(norm(x, module.norm), module.uvqk)).split(module.sizes, 1)
    channels = [
        relative(v, module.by_position.weight, heads),
        relative(v, module.by_time.weight, heads, times),
        attention(q, k, v, heads, module.config.max_seq_len, 0),
    ]
    y = x + linear(u * norm(torch.cat(channels, 1), gate_norm), module.output)
    gate, value = linear(norm(y, module.ffn_norm), module.ffn.inner).chunk(2, 1)
    return y + linear(silu(gate) * value, module.ffn.outer)


def sasrec_layer(x, module):
    """One sample (n, d), without dropout."""
    heads = module.config.heads
    parts = linear(layer_norm(x, module.norm), module.qkv).split(module.sizes, 1)
    attended = []
    for q, k, v in zip(*(part.chunk(heads, 1) for part in parts), strict=True):
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (q @ k.t() * module.config.qk_dim**-0.5).masked_fill(later, -torch.inf)
        attended.append(torch.softmax(scores, 1) @ v)
    x = x + linear(torch.cat(attended, 1), module.output)
    return x + linear(linear(layer_norm(x, module.ffn_norm), module.inner).clamp(min=0), module.outer)


def sampled_softmax(hidden, positives, negatives, valid, temperature):
    """Losses (n,) of one sample's tokens."""
    losses = []
    for row, positive, others, kept in zip(hidden, positives, negatives, valid, strict=True):
        scores = torch.cat([(row @ positive)[None], others[kept] @ row]) / temperature
        losses.append(torch.logsumexp(scores, 0) - scores[0])
    return torch.stack(losses) if losses else hidden.new_zeros(0)


def assert_same(results, model, exact, sums):
    """What a model gives, and the gradients of its parameters, are those of a formula in float64.

    results: name -> found and expected. exact: the model in float64, whose backward has run. sums: the exact
    ones by name, where they have taken the gradients.
    """
    for name, parameter in exact.named_parameters():
        found = ops.from_fixed_point(sums[name]) if sums else model.get_parameter(name).grad
        assert parameter.grad.any(), name
        results[name] = found, parameter.grad
    for name, (found, expected) in results.items():
        scale = expected.detach().abs().max()
        error = (found.double() - expected.detach()).abs().max()
        assert error <= 3e-5 * scale, f"{name}: error {error:.3g} of {scale:.3g}"
