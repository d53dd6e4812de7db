"""The two errors that users of jaxpipe see, and other errors in words."""

from __future__ import annotations

import re


class ScheduleError(ValueError):
    """A schedule is malformed, incomplete, misplaced, deadlocks, or does not fit in memory."""


class PipelineError(ValueError):
    """A model, a batch, a mesh or a call cannot be pipelined as asked."""


def error_in_words(error: BaseException) -> str:
    """An error's kind and message as a sentence; of a traceback in the message, the error alone.

    XLA puts the traceback of a failed callback into its message.

    >>> error_in_words(ValueError("too large"))
    'ValueError: too large.'
    """
    kind = type(error).__name__
    if kind == "InternalFloatingPointError":  # of jax.debug_nans and jax.debug_infs
        return f"there is a {error.args[-1]} in its results."
    text = str(error).strip() or "no message"
    before, _, traceback = text.partition("Traceback (most recent call last):\n")
    raised = re.split(r"^  File .*\n(?:    .*\n)*", traceback, flags=re.MULTILINE)[-1].strip()
    return f"{kind}: {before + raised if raised else text}".rstrip(".") + "."
