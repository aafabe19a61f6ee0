"""A dispatch mode that notes which of warpspec's operators are called."""

from torch.utils._python_dispatch import TorchDispatchMode

PREFIX = "warpspec::"


class Recorder(TorchDispatchMode):
    """Names of our operators that run under it, without their namespace, in order; it runs them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.name().startswith(PREFIX):
            self.names.append(function.name().removeprefix(PREFIX))
        return function(*arguments, **(options or {}))
