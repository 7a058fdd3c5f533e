"""The one exception that a user's mistake raises."""


class UserError(ValueError):
    """A mistake in what the user gave (path, file, field, flag), told in one line.

    The message names the file, the field or tensor, and what to do. The command line prints it
    without a traceback and ends with exit code 2; from Python it is a ``ValueError``.
    """
