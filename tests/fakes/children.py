"""Processes that are copies of this one, for tests that stop them or run several at once."""

import os


def child(work, *arguments) -> int:
    """The number of a new process that does the work: it ends with 0, or 1 if the work raises."""
    number = os.fork()
    if not number:
        status = 1
        try:
            work(*arguments)
            status = 0
        finally:
            os._exit(status)
    return number


def ended(number: int) -> int:
    """How it ended, once it has: its status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
