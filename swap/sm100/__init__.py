"""The products for sm_100a."""
