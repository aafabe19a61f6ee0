"""Compiles kernels ahead of time, on a machine without a GPU: ``python -m warpspec compile --model gpt-oss-120b``.

They are kept in the cache folder (``warpspec.common.kernel_cache``). Copy the folder to another machine of the same
kind (CPU, versions of warpspec and its compiler) and name it in WARPSPEC_CACHE_DIR, and nothing is compiled there.
"""
