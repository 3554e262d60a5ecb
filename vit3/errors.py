"""What a user can mend: one sentence, no traceback."""


class UserError(Exception):
    """Names the argument, the value given, what is allowed and the cure."""
