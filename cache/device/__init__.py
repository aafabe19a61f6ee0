"""Device code of the insert kernel."""
