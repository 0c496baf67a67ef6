"""`torch.compile` over `tritonrec.ops`: each op is one node of the graph, with its own backward."""

import sys

import torch
from plain import JaggedEncoder  # the module beside this file


def main(backend: str = "inductor") -> None:
    torch.manual_seed(0)
    model = JaggedEncoder(rows=100, dim=16, heads=2, max_seq_len=8)
    compiled = torch.compile(model, backend=backend)
    for lengths in ([3, 0, 2], [5, 1], [8, 8, 0, 4]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.randint(0, 100, (int(offsets[-1]),))
        expected, got = model(ids, offsets), compiled(ids, offsets)
        torch.testing.assert_close(got, expected)
        (want,) = torch.autograd.grad(expected.square().sum(), [model.table])
        (have,) = torch.autograd.grad(got.square().sum(), [model.table])
        torch.testing.assert_close(have, want)
        print(f"lengths {lengths}: the compiled module agrees, gradients too")


if __name__ == "__main__":
    main(*sys.argv[1:])
