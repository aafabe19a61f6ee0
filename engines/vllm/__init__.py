"""`warpspec.fmha` as an attention backend of vLLM, 0.32 and later (the V1 engine).

Installed beside vLLM, this is a plug-in that vLLM loads by itself:

    vllm serve MODEL --attention-backend WARPSPEC

Decoder layers with head sizes 64, 128, 256 and 512 in bfloat16 or float16: grouped heads, sinks, sliding windows.
"""

from __future__ import annotations

NAME = "WARPSPEC"
PATH = "warpspec.engines.vllm.attention.WarpspecBackend"


def register() -> None:
    """Entry point of vLLM's plug-ins: make the backend's name known. Nothing else is imported."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(NAME, PATH)


def replace_cpu_attention() -> None:
    """Run our attention where vLLM runs on a CPU, which has one backend and no choice: for tests.

    The kernel is the one that WARPSPEC_BACKEND names ("sim" or "reference").
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register()
    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
