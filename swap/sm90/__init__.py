"""The products for sm_90a, and the fused kernel."""
