"""The attention kernel for sm_90a: its configuration, and the kernel family that ``fmha.launch`` compiles and runs."""

from __future__ import annotations

from warpspec.common.launch import Kernel
from warpspec.fmha.sm90.choices import CHOICES
from warpspec.fmha.sm90.config import AttentionConfig

__all__ = ["ATTENTION", "CHOICES", "AttentionConfig"]


def attention_arguments(config: AttentionConfig) -> tuple:
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.host import fake_arguments  # brings in the DSL
    from warpspec.fmha.sm90.kernel import Attention

    return (Attention(config), *fake_arguments(config))


ATTENTION = Kernel("fmha.sm90", attention_arguments)
