"""Where there is no GPU, Triton kernels run in the interpreter: decided before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
