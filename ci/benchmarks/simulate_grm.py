"""GRM-4G and GRM-110G on 8 to 128 GPUs, simulated from the published sizes (MTGRBoost, Figure 17).

    python ci/benchmarks/simulate_grm.py --json out/simulate_grm.json

Published: operations of a forward pass, dimension and blocks (Table 1); samples of a GPU (Table 2); 600
tokens a sample; nodes of 8 A100, 600 GB/s within and 200 GB/s between them. Assumed: backward costs two
forwards; 40 % of 312 TFLOP/s; links of half the printed bandwidth in each direction, shared by the GPUs of
a node; one id a token, rows of 64 values at 1D, keys as in `tritonrec simulate`; lookup takes no time.
**Nothing is fitted.**

Printed is throughput on W GPUs over W / 8 times that of 8 GPUs. `exposed`: exchanges of rows and the
reduction of dense gradients stand beside nothing. `overlapped`: NestPipe's schedule with N = 4, and the
reduction hidden behind the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame import options_of, record

from tritonrec.harness.simulator.cluster import Cluster, Workload, predict
from tritonrec.harness.simulator.plan import Plan
from tritonrec.nn import GRM_SIZES

GPUS = (8, 16, 32, 64, 128)
NODE, TOKENS, ROW = 8, 600, 64
FLOPS, SHARE = 312e12, 0.4
WITHIN, BETWEEN = 600e9 / 2, 200e9 / 2 / NODE


@dataclass(frozen=True)
class Setting:
    """Operations of a forward pass, samples of a GPU, and the factor of the rows' dimension."""

    model: str
    operations: float
    samples: int
    factor: int

    @property
    def dense_bytes(self) -> float:
        """Of gradients of U, Q, K, V and of the output, in each block."""
        sizes = GRM_SIZES[self.model]
        return 4.0 * sizes["layers"] * 5 * sizes["dim"] ** 2

    def step(self, gpus: int, overlapped: bool) -> float:
        """Seconds."""
        compute = 3 * self.operations * self.samples / (FLOPS * SHARE)
        link = WITHIN if gpus <= NODE else BETWEEN
        cluster = Cluster(gpus, compute, 0.0, link, 0.0, node_size=NODE, node_bandwidth=WITHIN)
        workload = Workload(self.samples, TOKENS, ROW * self.factor, GRM_SIZES[self.model]["layers"])
        mode = "nestpipe" if overlapped else "sequential"
        step = predict(cluster, workload, Plan(mode, 4 if overlapped else 1)).step
        return step if overlapped else step + cluster.all_reduce(self.dense_bytes, gpus)


SETTINGS = (
    Setting("GRM-4G", 4e9, 496, 1),
    Setting("GRM-110G", 110e9, 116, 1),
    Setting("GRM-4G", 4e9, 496, 2),
    Setting("GRM-4G", 4e9, 496, 64),
)


def scaling(setting: Setting, overlapped: bool) -> list[float]:
    """Of each number of GPUs, the share of the ideal."""
    first = setting.step(GPUS[0], overlapped)
    return [first / setting.step(gpus, overlapped) for gpus in GPUS]


def main() -> None:
    args = options_of(__doc__)
    rows = []
    for setting in SETTINGS:
        for overlapped in (False, True):
            shares = scaling(setting, overlapped)
            how = "overlapped" if overlapped else "exposed"
            name = f"{setting.model} {setting.factor}D"
            rows.append({"model": name, "how": how, "shares": dict(zip(map(str, GPUS), shares, strict=True))})
            print(f"{name:12} {how:11} " + " ".join(f"{share:6.1%}" for share in shares))
    record(args, rows=rows)


if __name__ == "__main__":
    main()
