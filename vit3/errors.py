"""What a user can mend: one sentence, no traceback."""


class UserError(Exception):
    """Names the argument, the value given, what is allowed and the cure."""


class Interrupted(Exception):
    """Somebody asked the program to stop, and everything is saved.

    Attributes:
        code: exit status to leave with.
    """

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


def first_line(error: Exception) -> str:
    """What an error says, shortened to its first line; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
