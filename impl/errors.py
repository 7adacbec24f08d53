"""Error caused by the user's input."""


class InputError(ValueError):
    """One line for the user: what is wrong, where, and what would be valid. The command line prints it and exits 2."""
