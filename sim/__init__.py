"""Functional simulator of sm_90a and sm_100a kernels compiled by CuTe DSL."""
