"""Attention and experts for the engines that run models: transformers, vLLM, SGLang, nano-vllm. One module an engine.

Importing this package, or naming one of its modules in an entry point, imports no engine. The engines run
``warpspec.fmha`` and ``warpspec.moe``; ``keys.py`` has what they have in common (pages, windows, checks).
"""
