"""Kernels compiled ahead, on a machine without a GPU: ``python -m warpspec compile --model gpt-oss-120b``.

They are kept in the cache folder (``warpspec.common.kernel_cache``). Whoever copies the folder to another machine of
the same kind (CPU, versions of warpspec and its compiler), and names it in WARPSPEC_CACHE_DIR, compiles nothing there.
"""
