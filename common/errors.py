"""Errors every operation shares."""


class UnsupportedProblem(ValueError):
    """A correct problem that the chosen backend cannot run.

    The message names the backend, the constraint and the value that breaks it. Nothing has been launched or
    written when it is raised, and no other backend is tried in its place.
    """
