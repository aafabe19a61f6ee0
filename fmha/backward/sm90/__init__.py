"""The backward kernel for sm_90a."""

from warpspec.common.launch import Kernel
from warpspec.fmha.backward.sm90.config import BackwardConfig

__all__ = ["MAIN", "BackwardConfig"]


def _arguments(config: BackwardConfig) -> tuple:
    from warpspec.fmha.backward.device.host import fake_arguments
    from warpspec.fmha.backward.sm90.kernel import Backward

    return Backward(config), *fake_arguments(config)


MAIN = Kernel("fmha.backward.sm90", _arguments)
