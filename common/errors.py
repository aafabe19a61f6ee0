"""Errors that all operations share."""


class UnsupportedProblem(ValueError):
    """A correct problem that the chosen backend cannot run.

    The message names the backend, the constraint and the value that breaks it. When it is raised, nothing has been
    launched or written, and no other backend is tried.
    """
