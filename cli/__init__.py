"""The command line, ``python -m warpspec COMMAND``: compile kernels ahead, run an operator in the simulator, compare
operators with their definitions, time them. Nothing here needs the repository."""
