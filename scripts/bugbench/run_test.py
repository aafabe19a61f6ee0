"""Runs one test of a repository (path::name) as a script."""

import sys

import pytest

path, _, name = sys.argv[1].partition("::")
off = ("-p", "no:cacheprovider", "-p", "no:warpspec", "-p", "no:randomly")
sys.exit(pytest.main([path, "-q", "-x", "--tb=short", "-W", "ignore", *off, "-k", name, "--maxfail=1"]))
