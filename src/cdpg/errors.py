"""What can go wrong, by whose fault it is and by the exit status it leaves."""


class CDPGError(Exception):
    """Base of every error raised on purpose; its message is one that a user can act on."""

    exit_status = 1


class UserError(CDPGError):
    """The user's input is wrong: what was given, what was expected, what to do."""

    exit_status = 2


class RunError(CDPGError):
    """The run cannot go on, though its input was well-formed."""


class Interrupted(CDPGError):
    """A signal ended what was under way; the message says what is saved and how to go on."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number


def first_line(error: BaseException) -> str:
    """What another library's exception says, without what it adds below; its type where it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__
