"""Attention on the device: code that every architecture's kernel runs."""
