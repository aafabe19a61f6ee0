"""Row softmax and fused softmax + top-k."""
