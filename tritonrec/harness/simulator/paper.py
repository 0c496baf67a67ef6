"""What NestPipe reports: every figure of its tables, and those of its figures that the text states.

The industrial cluster has up to 1,536 NPUs and trains HSTU, the other one 128 GPUs and FuXi on KuaiRand-27K.
Batches are 512 samples per worker: queries per second times step latency gives that at every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .plan import Plan

Column = Literal[
    "step ms", "speedup", "lookup ms", "communication ms", "exposed ms", "exposed %", "QPS 1e5", "scaling %",
    "lookup share %", "communication share %", "utilization %", "compute ms", "lookup hidden %",
]  # fmt: skip
WORKERS = (128, 256, 512, 1024, 1536)
GROUPS = 4
"""Copies of the tables in 2D sparse parallelism (section VII.A)."""
WINDOW = 8
"""Micro-batches of NestPipe: the exposed ratios of Tables II and IV and Fig. 10 are 12.3 to 13.0 %, 1/8."""


@dataclass(frozen=True)
class Row:
    """How a row was run; `tokens`, `dim` and `layers` replace the workload's where they are given."""

    plan: Plan
    tokens: int | None = None
    dim: int | None = None
    layers: int | None = None

    @property
    def changes(self) -> dict[str, int]:
        """Fields of `Workload` that this row has of its own."""
        given = {"tokens": self.tokens, "dim": self.dim, "layers": self.layers}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class PaperCell:
    """One printed figure. `text` keeps its digits, and so how far it was rounded."""

    table: str
    row: str
    column: Column
    text: str
    workers: int = 1536
    cluster: Literal["npu", "gpu"] = "npu"

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def rounding(self) -> float:
        """Half a unit of the last digit, relative to the value."""
        digits = len(self.text.partition(".")[2])
        return 0.5 * 10.0**-digits / self.value

    @property
    def fitted(self) -> bool:
        """Whether the constants are fitted on this cell: TorchRec's rows of Tables II and III, no others."""
        return self.row == "TorchRec" and self.table in ("Table II", "Table III")


NESTPIPE = Plan("nestpipe", WINDOW, clustered=True)
ROWS = {
    "TorchRec": Row(Plan("sequential")),
    "2D-SP": Row(Plan("sequential", replicas=GROUPS)),
    "UniEmb": Row(Plan("prefetch")),
    "NestPipe": Row(NESTPIPE),
    "NestPipe+2D-SP": Row(Plan("nestpipe", WINDOW, replicas=GROUPS, clustered=True)),
    "micro-batch 16, plain": Row(Plan("nestpipe", 32)),
    "micro-batch 16, clustered": Row(Plan("nestpipe", 32, clustered=True)),
    "DBP alone": Row(Plan("dbp")),
    "FWP alone": Row(Plan("fwp", WINDOW, clustered=True)),
    "2 layers": Row(NESTPIPE, layers=2),
    "8 layers": Row(NESTPIPE, layers=8),
    "dimension 1024": Row(NESTPIPE, dim=1024),
    "512 tokens": Row(NESTPIPE, tokens=512),
    "2048 tokens": Row(NESTPIPE, tokens=2048),
}

_TABLE_2 = """
npu 1536 TorchRec 5793.83 1.00 2870.99 1207.85
npu 1536 2D-SP    4914.01 1.18 2766.68  438.36
npu 1536 UniEmb   2919.76 1.98   36.21 1169.01
npu 1536 NestPipe 1895.98 3.06   30.19  154.23
gpu  128 TorchRec 4207.94 1.00  856.63  312.19
gpu  128 2D-SP    4052.98 1.04  907.87  107.23
gpu  128 UniEmb   3384.05 1.24   23.49  327.29
gpu  128 NestPipe 3090.45 1.36   12.77   38.95
"""
_TABLE_3 = """
 128 TorchRec 0.26 1.00 -     2D-SP 0.27 1.04 -     UniEmb 0.33 1.27 -     NestPipe 0.37 1.42 -
 256 TorchRec 0.47 1.00 91.23 2D-SP 0.49 1.04 91.36 UniEmb 0.63 1.34 96.13 NestPipe 0.72 1.53 98.39
 512 TorchRec 0.68 1.00 66.64 2D-SP 0.75 1.10 69.64 UniEmb 1.17 1.72 89.21 NestPipe 1.43 2.10 97.33
1024 TorchRec 1.09 1.00 53.36 2D-SP 1.22 1.12 56.67 UniEmb 2.04 1.87 78.00 NestPipe 2.80 2.57 95.63
1536 TorchRec 1.36 1.00 44.34 2D-SP 1.60 1.18 49.32 UniEmb 2.65 1.98 67.62 NestPipe 4.14 3.06 94.07
"""


def _table_2() -> list[PaperCell]:
    columns: tuple[Column, ...] = ("step ms", "speedup", "lookup ms", "exposed ms")
    found = []
    for line in _TABLE_2.split("\n")[1:-1]:
        cluster, workers, row, *texts = line.split()
        found += [
            PaperCell("Table II", row, column, text, int(workers), cluster)  # type: ignore[arg-type]
            for column, text in zip(columns, texts, strict=True)
        ]
    return found


def _table_3() -> list[PaperCell]:
    columns: tuple[Column, ...] = ("QPS 1e5", "speedup", "scaling %")
    found = []
    for line in _TABLE_3.split("\n")[1:-1]:
        workers, *entries = line.split()
        for place in range(0, len(entries), 4):
            row, *texts = entries[place : place + 4]
            found += [
                PaperCell("Table III", row, column, text, int(workers))
                for column, text in zip(columns, texts, strict=True)
                if text != "-"
            ]
    return found


CELLS: tuple[PaperCell, ...] = (
    # That TorchRec is 1.00 times as fast as itself says nothing.
    *(cell for cell in (*_table_2(), *_table_3()) if (cell.row, cell.column) != ("TorchRec", "speedup")),
    # Section VII.B: "DBP-only alleviates about 98% lookup latency for different datasets".
    PaperCell("Table II", "DBP alone", "lookup hidden %", "98"),
    PaperCell("Table II", "DBP alone", "lookup hidden %", "98", 128, "gpu"),
    PaperCell("Table II", "FWP alone", "exposed %", "13"),
    PaperCell("Table IV", "NestPipe", "communication ms", "1185.60"),
    PaperCell("Table IV", "NestPipe+2D-SP", "communication ms", "452.34"),
    PaperCell("Table IV", "NestPipe+2D-SP", "exposed ms", "55.64"),
    PaperCell("Table IV", "NestPipe+2D-SP", "QPS 1e5", "4.32"),
    PaperCell("Table IV", "NestPipe+2D-SP", "scaling %", "97.17"),
    PaperCell("Fig. 2", "TorchRec", "lookup share %", "24.4", 128),
    PaperCell("Fig. 2", "TorchRec", "lookup share %", "49.6"),
    PaperCell("Fig. 2", "TorchRec", "communication share %", "9.2", 128),
    PaperCell("Fig. 2", "TorchRec", "communication share %", "20.5"),
    PaperCell("Fig. 8", "TorchRec", "utilization %", "66.4", 128),
    PaperCell("Fig. 8", "TorchRec", "utilization %", "29.6"),
    PaperCell("Fig. 8", "2D-SP", "utilization %", "70.5", 128),
    PaperCell("Fig. 8", "2D-SP", "utilization %", "34.8"),
    PaperCell("Fig. 9", "micro-batch 16, plain", "communication ms", "1331.33", 512),
    PaperCell("Fig. 9", "micro-batch 16, plain", "exposed %", "25.2", 512),
    PaperCell("Fig. 9", "micro-batch 16, clustered", "exposed ms", "27.71", 512),
    PaperCell("Fig. 10", "dimension 1024", "exposed %", "12.9"),
    PaperCell("Fig. 10", "2 layers", "compute ms", "892.78"),
    PaperCell("Fig. 10", "2 layers", "exposed %", "27.9"),
    PaperCell("Fig. 10", "8 layers", "compute ms", "3393.12"),
    PaperCell("Fig. 10", "8 layers", "communication ms", "1169.8"),
    PaperCell("Fig. 10", "8 layers", "exposed ms", "146.23"),
    PaperCell("Fig. 10", "512 tokens", "compute ms", "850.08"),
    PaperCell("Fig. 10", "2048 tokens", "compute ms", "3399.96"),
    PaperCell("Fig. 10", "2048 tokens", "exposed ms", "165.12"),
)
