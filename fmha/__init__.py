"""Attention: `attention`, `merge` and `AttentionState`."""
