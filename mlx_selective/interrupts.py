"""Ctrl-C as a flag: the running step is always finished."""

import signal


class InterruptFlag:
    """While it is entered, SIGINT only sets ``raised``.

    No exception can then strike between two layers and leave one cache ahead of another.
    """

    def __init__(self):
        self.raised = False
        self._previous = None

    def __enter__(self):
        self.raised = False
        self._previous = signal.signal(signal.SIGINT, self._raise)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self._previous)

    def _raise(self, signum, frame):
        self.raised = True
