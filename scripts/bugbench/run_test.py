"""Runs one test of a repository (path::name) as a script."""

import sys

import pytest

off = ("-p", "no:cacheprovider", "-p", "no:warpspec", "-p", "no:randomly")
sys.exit(pytest.main([sys.argv[1], "-q", "-x", "--tb=short", "-W", "ignore", *off]))
