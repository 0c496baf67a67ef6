"""MTGRBoost (arXiv 2505.12663)."""

from __future__ import annotations

from typing import Any

from .row import Row, only


def _setting(figures: Any, size: str, ranks: int, setting: str) -> Any:
    return only(figures["rows"], size=size, ranks=ranks, setting=setting)


def _grm(figures: Any, size: str, ranks: int, *settings: str) -> str:
    return ", ".join(
        f"{setting.removeprefix('+ ')} "
        f"{1 / _setting(figures, size, ranks, setting)['cpu_per_1000_tokens_ratio']:.2f}x"
        for setting in settings
    )


def _counts(figures: Any, ranks: int, key: str) -> str:
    names = {
        "+ merging": "none", "+ dedup before the exchange": "exchange",
        "+ dedup before the lookup": "lookup", "+ both": "both",
    }  # fmt: skip
    return ", ".join(
        f"{short} {_setting(figures, 'small', ranks, setting)[key]:,.0f}" for setting, short in names.items()
    )


def _spread(figures: Any, ranks: int) -> str:
    before, after = (
        only(figures["rows"], ranks=ranks, dealt=dealt)["spread"] for dealt in ("round robin", "Algorithm 1")
    )
    return f"max - min of {before:,.0f} tokens becomes {after:,.0f} ({ranks} ranks)"


def _scaling(figures: Any) -> str:
    shown = []
    for model in dict.fromkeys(row["model"] for row in figures["rows"]):
        nothing, all_of_it = (
            only(figures["rows"], model=model, how=how)["shares"]["128"] for how in ("exposed", "overlapped")
        )
        shown.append(f"{model} {nothing:.0%}, {all_of_it:.0%}")
    return "without and with overlap: " + "; ".join(shown)


ADDED = ("+ merging", "+ both", "+ balancing")
DEDUP = ("+ dedup before the exchange", "+ dedup before the lookup", "+ both")

ROWS = [
    Row("Eq. 1, 2: U, Q, K, V and attention with SiLU", "works", "One fused layer", link="models.md#grm"),
    Row(
        "Eq. 3: MLP(Norm(O * U))",
        "works",
        "`GRMConfig(norm_product=True)`; the default is norm(O) * U, as in HSTU, upon which the paper builds",
        link="models.md#grm",
    ),
    Row("Eq. 4: MMoE, top k of the experts", "works", "One gate a task", link="models.md#grm"),
    Row(
        "Figs 3, 4: sequence of context, history, exposed items; one sample a user",
        "works",
        "",
        link="models.md#grm",
    ),
    Row(
        "Data I/O from partitioned columnar shards (section 3, Fig. 5)",
        "works",
        "Parquet shards of sequences, of GRM's windows and of clicks are streamed, and a rank reads its own",
        link="data.md#streaming",
    ),
    Row(
        "Three streams: copy, dispatch, compute (section 3)",
        "works",
        "Lanes of the schedules",
        link="traces.md",
    ),
    Row("Key structure apart from values, chunks (4.1, Fig. 6a)", "works", "", link="embedding.md#tables"),
    Row(
        "MurmurHash3 (4.1)",
        "differs",
        "Its 64-bit finaliser alone: an id is one block. Checked against the published constants",
        link="ops.md",
    ),
    Row(
        "Grouped parallel probing, eq. 5; Theorem 1, eq. 6",
        "differs",
        "Groups of eight neighbouring slots, and an odd step from the hash where eq. 5 takes it from the "
        "key. 256 drawn keys in each table of 8 to 4,096 slots",
        "proof",
        lambda f: f"{f['probe_sequences']:,} keys visit every slot of their table once",
        "probing",
        "ops.md",
    ),
    Row(
        "Lookup by offset, eq. 7",
        "works",
        "Handles name a row; they stay valid while tables grow",
        link="embedding.md#tables",
    ),
    Row(
        "Capacity expansion above load 0.75 (4.1, Fig. 6c)",
        "works",
        "A few groups move with each call; meanwhile the old structure may fill a little further",
        "0.75",
        lambda f: f"largest load {f['largest_load']:.3f} of {f['keys']:,} keys",
        "growth",
        "embedding.md#tables",
    ),
    Row(
        "Eviction, LRU and LFU (4.1)",
        "works",
        "By step numbers, so bits stay equal; TTL too",
        link="embedding.md#policies",
    ),
    Row(
        "Automated merging, FeatureConfig, HashTableCollection (4.2)",
        "works",
        "",
        link="embedding.md#merging",
    ),
    Row(
        "Eq. 8 and Fig. 7: ids of merged tables",
        "works",
        "Checked for 2 to 64 tables, at both ends of the ids",
        "",
        lambda f: f"{f['merged_tables']} tables without a clash",
        "probing",
        "embedding.md#merging",
    ),
    Row(
        "Two-stage dedup (4.3, Fig. 8): keys exchanged in a step",
        "works",
        "GRM on MovieLens-100K, 128 samples on two ranks",
        "",
        lambda f: _counts(f, 2, "keys_exchanged"),
        "grm",
        "embedding.md#dedup",
    ),
    Row(
        "Two-stage dedup: rows read in a step",
        "works",
        "The same run",
        "",
        lambda f: _counts(f, 2, "rows_read"),
        "grm",
        "embedding.md#dedup",
    ),
    Row(
        "Algorithm 1, dynamic sequence batching (5.1, Figs 9, 10, 15)",
        "works",
        "MovieLens-100K, 128 samples; the paper's sequences reach 3,000 tokens, these 200",
        "differences of up to 40,000 tokens become small",
        lambda f: _spread(f, 8),
        "balance",
        "embedding.md#accumulation-and-balancing",
    ),
    Row(
        "Gradients weighted by batch sizes (5.1)",
        "works",
        "The loss is divided by its terms over all ranks",
        link="consistency.md",
    ),
    Row(
        "Elastic checkpoints: 8 ranks saved, 16 load (5.2)",
        "works",
        "Any world size; slices of the hash in place of the modulo",
        link="checkpoints.md",
    ),
    Row(
        "Mixed precision: dense FP16, cold rows FP16 (5.2)",
        "differs",
        "Dense bfloat16 or float16 by autocast. Cold rows are stored in 16 bits and computed in float32; the "
        "paper computes in FP16. `ExchangeConfig.precision` sends all rows in 16 bits, not cold ones alone",
        link="embedding.md#policies",
    ),
    Row("Gradient accumulation (5.2)", "works", "", link="embedding.md#accumulation-and-balancing"),
    Row(
        "Operator fusion of HSTU (5.2)",
        "works",
        "161 TFLOP/s on an H100, a fifth of its roof (platforms.md)",
        link="attention.md",
    ),
    Row(
        "Table 1: GRM 4G and GRM 110G",
        "works",
        "`GRM_SIZES`: dimension, blocks and heads as printed; the width of a head is not, and taken as the "
        "dimension over the heads",
        "512, 3, 2 and 1,024, 22, 4",
        "the same",
        "",
        "models.md#grm",
    ),
    Row(
        "Fig. 2, 11: AUC and GAUC over training",
        "not here",
        "Meituan's log is not public. On MovieLens-100K GAUC is below the rate of an item, after three "
        "epochs and, overfitted, after ten",
        link="embedding.md#a-run",
    ),
    Row(
        "Fig. 12: time of lookup, forward and backward",
        "not here",
        "`tritonrec profile` splits a step of any job; no run beside TorchRec's GRM",
        link="launches.md",
    ),
    Row(
        "Fig. 13: throughput as techniques are added",
        "differs",
        "Tokens per CPU second of two ranks, MovieLens-100K. Exchanges cost copies and no network, and "
        "computation is most of a step. Four ranks, and links of limited rate, have not been measured: two "
        "cores are shared. GRM 110G is offered and has not been run",
        "1.60x to 2.44x in all",
        lambda f: "GRM 4G: " + _grm(f, "GRM-4G", 2, *ADDED) + "; small: " + _grm(f, "small", 2, *ADDED),
        "grm",
    ),
    Row(
        "Fig. 14, Table 2: throughput and memory with balancing, 8 to 64 GPUs",
        "not here",
        "The tokens' spread is measured (Algorithm 1 above), no GPU's memory",
    ),
    Row(
        "Fig. 16: four dedup strategies",
        "differs",
        "As Fig. 13. Counts of keys and rows are above, and no other load changes them",
        "1.1x to 3.7x for both stages",
        lambda f: "small, 2 ranks: " + _grm(f, "small", 2, *DEDUP),
        "grm",
    ),
    Row(
        "Table 3: dynamic table beside MCH, throughput",
        "differs",
        "Of ids to row numbers with inserts, not of training: an MCH-like table made here, Zipf ids, "
        "0.2 % of the items new with each batch, at capacities of 50,000, 200,000 and 800,000",
        "1.47x to 2.22x",
        lambda f: ", ".join(f"{row['ratio']:.2f}x" for row in f["rows"]),
        "mch",
        "embedding.md#beside-a-table-of-a-fixed-size",
    ),
    Row(
        "Table 3: memory; ids without a row of their own",
        "works",
        "The same run. The fixed table has all rows from the start; quality is not measured",
        "MCH ends out of memory at 64D",
        lambda f: "; ".join(
            f"{row['ours_bytes'] / 1e6:.0f} and {row['peer_bytes'] / 1e6:.0f} MB, "
            f"{row['on_the_shared_row']:.0%} of ids on the peer's shared row"
            for row in f["rows"]
        ),
        "mch",
        "embedding.md#beside-a-table-of-a-fixed-size",
    ),
    Row(
        "Fig. 17: scaling to 128 GPUs",
        "differs",
        "Simulated from the published operations, samples, nodes and links alone, nothing fitted, lookup and "
        "stragglers left out. Rows of 64 x 64 values would cost more than the paper's; the figure's own "
        "values are in a picture",
        "62.75 to 78.5 % of the ideal for all models",
        _scaling,
        "scaling",
        "simulator.md#a-cluster-of-gpus",
    ),
]
