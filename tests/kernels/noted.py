"""Which of our ops torch's dispatcher meets."""

from torch.utils._python_dispatch import TorchDispatchMode


class Noted(TorchDispatchMode):
    """The names of our ops that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonrec":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
