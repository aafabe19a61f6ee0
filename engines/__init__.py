"""Attention for the engines that serve models: transformers, vLLM, SGLang, nano-vllm. One module an engine.

Importing this package, or naming a module of it in an entry point, imports no engine. What is run is
``warpspec.fmha``; what engines have in common (pages, windows, checks) is in ``keys.py``.
"""
