"""A plug-in of SGLang for tests: its Triton kernels of speculative decoding on a CPU, by Triton's interpreter.

With this folder in PYTHONPATH and TRITON_INTERPRET=1, SGLang's own kernels build and verify trees of drafts and copy
keys; it has them interpreted where it would look for sgl-kernel, of which there is no wheel for CPUs without AMX.
"""


def register() -> None:
    from sglang.kernels.ops.speculative import cache_locs, spec_tree

    for module in (cache_locs, spec_tree):
        module._is_xpu = True  # a device for which it chooses its Triton kernels
