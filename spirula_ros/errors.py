"""The one exception that means "what you gave me cannot be used": the command line prints it as one line and exits with 2."""


class InputError(ValueError):
    """Bad input from outside (a file, a folder, an argument). The message names it, the limit and the remedy."""
