"""Exceptions of the package, each with the exit status of the command line."""


class CDPGError(Exception):
    """Base of all exceptions of the package; the message tells the user what to do."""

    exit_status = 1


class UserError(CDPGError):
    """The user's input is wrong: what was given, what was expected, what to do."""

    exit_status = 2


class RunError(CDPGError):
    """The run cannot continue, although its input was valid."""


class Interrupted(CDPGError):
    """A signal stopped the run; the message says what is saved and how to continue."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


def first_line(error: BaseException) -> str:
    """The first line of another library's exception, or its type if it has no text."""
    return str(error).strip().split("\n")[0] or type(error).__name__
