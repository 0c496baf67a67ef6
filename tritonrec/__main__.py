"""``python -m tritonrec``, for torchrun."""

from .harness.cli import main

main()
