"""Integers as users give them: Python's, NumPy's and JAX's alike, and never a boolean."""

from __future__ import annotations

import operator


def integer(number: object) -> int | None:
    """``number`` as an int, or None if it is none.

    >>> integer(3), integer(3.0), integer(True)
    (3, None, None)
    """
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]  # what has no __index__ raises
    except TypeError:
        return None
