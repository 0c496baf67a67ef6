"""Records the ops that pass torch's dispatcher."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchedOps(TorchDispatchMode):
    """Records the names of this library's ops in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonrec":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
