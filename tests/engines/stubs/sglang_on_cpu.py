"""A plug-in of SGLang for tests: what it does with Triton kernels and with NVFP4 caches, on a CPU.

With this folder in the path and TRITON_INTERPRET=1, SGLang's own kernels build and verify trees of drafts and copy
keys; it has them interpreted where it would look for sgl-kernel, of which there is no wheel for CPUs without AMX. And
it makes pools of NVFP4, which it does on GPUs alone.
"""


def register() -> None:
    import torch
    from sglang.kernels.ops.speculative import cache_locs, spec_tree
    from sglang.srt.mem_cache import kv_cache_configurator

    for module in (cache_locs, spec_tree):
        module._is_xpu = True  # a device for which it chooses its Triton kernels
    kv_cache_configurator.is_float4_e2m1fn_x2 = lambda dtype: dtype == torch.float4_e2m1fn_x2
