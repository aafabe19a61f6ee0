"""The kernel for sm_90a that makes dQ by query tiles, without sums in memory."""

from warpspec.common.launch import Kernel
from warpspec.fmha.backward.sm90.queries.config import QueryConfig

__all__ = ["QUERIES", "QueryConfig"]


def _arguments(config: QueryConfig) -> tuple:
    from warpspec.common.operands import fakes
    from warpspec.fmha.backward.operands import QueryOperands
    from warpspec.fmha.backward.sm90.queries.kernel import Queries

    return Queries(config), *fakes(QueryOperands, config)


QUERIES = Kernel("fmha.backward.sm90.queries", _arguments)
