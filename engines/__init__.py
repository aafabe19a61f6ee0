"""Attention and experts for the engines that run models: transformers, vLLM, SGLang, nano-vllm. One module an engine.

Importing this package, or naming a module of it in an entry point, imports no engine. What is run is
``warpspec.fmha`` and ``warpspec.moe``; what engines have in common (pages, windows, checks) is in ``keys.py``.
"""
