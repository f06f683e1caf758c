"""What ends a command before or instead of its work, told to a person."""


class StartupError(Exception):
    """The environment or the configuration does not allow it. The message says what happened, which value, and what to do; the command
    line prints it without a traceback and exits with 2."""
