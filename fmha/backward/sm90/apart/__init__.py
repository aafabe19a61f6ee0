"""Two kernels for sm_90a without sums in memory: one makes dQ by query tiles, one dK and dV by key tiles."""

from warpspec.common.launch import Kernel
from warpspec.fmha.backward.sm90.apart.config import KeyConfig, QueryConfig

__all__ = ["KEYS", "QUERIES", "KeyConfig", "QueryConfig"]


def _queries(config: QueryConfig) -> tuple:
    from warpspec.common.operands import fakes
    from warpspec.fmha.backward.operands import QueryOperands
    from warpspec.fmha.backward.sm90.apart.kernel import Queries

    return Queries(config), *fakes(QueryOperands, config)


def _keys(config: KeyConfig) -> tuple:
    from warpspec.fmha.backward.device.host import fake_arguments
    from warpspec.fmha.backward.sm90.apart.kernel import Keys

    return Keys(config), *fake_arguments(config)


QUERIES = Kernel("fmha.backward.sm90.queries", _queries)
KEYS = Kernel("fmha.backward.sm90.keys", _keys)
