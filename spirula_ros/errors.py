"""What "you gave me something that cannot be used" is: of the whole run (InputError), or of one message (BadMessage)."""


class InputError(ValueError):
    """Bad input from outside (a file, a folder, an argument): the command line prints it as one line and exits with 2. The message names it, the
    limit and the remedy."""


class BadMessage(Exception):
    """A message that cannot be used. reason: the snake_case word it is counted under; text: for a person, with remedy."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


def said(error: BaseException) -> str:
    """Of an error, for a person: the name of its class only where the text was not written to stand alone, and no [Errno 2]."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, (ValueError, RuntimeError)) and str(error) else f"{type(error).__name__}: {error}"
