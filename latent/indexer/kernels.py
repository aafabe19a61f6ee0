"""The indexer's kernels that differ between architectures. Plain Python."""

from __future__ import annotations

from typing import NamedTuple

from warpspec.common.architecture import Family
from warpspec.common.launch import Kernel
from warpspec.latent.indexer.scores_config import ScoresConfig
from warpspec.latent.indexer.sm100.config import Sm100ScoresConfig


class IndexKernels(NamedTuple):
    """The indexer's kernels of one architecture.

    config: class of score configurations. scores: kernel of one of them. stream: kernel that scores and selects in one
    launch, by ``StreamConfig``.
    """

    config: type[ScoresConfig] | type[Sm100ScoresConfig]
    scores: Kernel
    stream: Kernel


def _kernels(backend: str, config: type) -> IndexKernels:
    return IndexKernels(
        config,
        *(
            Kernel(
                f"indexer.{backend}.{name}", f"warpspec.latent.indexer.{backend}.{name}:host_and_arguments"
            )
            for name in ("scores", "stream")
        ),
    )


INDEX = Family(
    "index_scores", sm90=_kernels("sm90", ScoresConfig), sm100=_kernels("sm100", Sm100ScoresConfig)
)
