"""Actions as one device sees them: ``F(i)``, ``B(i)``, ``I(i)``, ``W(i)``.

A device names an action by its kind, its microbatch and its *chunk*: the c-th stage that the
device holds, 0 unless said. This file knows no placement, so no stages.
"""

from __future__ import annotations

from typing import NamedTuple


class LocalAction(NamedTuple):
    """An action as its device names it: chunk c is the device's c-th stage."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __repr__(self) -> str:
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        return f"{self.kind}({self.microbatch}{chunk})"


class Kind(str):
    """A kind of action; called with a microbatch (and a chunk) it makes a `LocalAction`.

    >>> F(3), B(0, chunk=1), F == "F"
    (F(3), B(0, chunk=1), True)
    """

    __slots__ = ()

    def __call__(self, microbatch: int, chunk: int = 0) -> LocalAction:
        return LocalAction(str(self), microbatch, chunk)

    def __repr__(self) -> str:
        return str(self)


F, B, I, W = Kind("F"), Kind("B"), Kind("I"), Kind("W")  # noqa: E741
