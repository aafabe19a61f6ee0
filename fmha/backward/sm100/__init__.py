"""The backward kernel for sm_100a."""

from warpspec.common.launch import Kernel
from warpspec.fmha.backward.sm100.config import BackwardConfig

__all__ = ["MAIN", "BackwardConfig"]


def _arguments(config: BackwardConfig) -> tuple:
    from warpspec.fmha.backward.device.host import fake_arguments
    from warpspec.fmha.backward.sm100.kernel import Backward

    return Backward(config), *fake_arguments(config)


MAIN = Kernel("fmha.backward.sm100", _arguments)
