"""Instruction families that Python executes. `registry` says how an instruction is added."""
