"""Phases and parts of kernels that are the same for sm_90a and sm_100a."""
