"""Actions: the atoms of a schedule.

An *action* is one pass of one stage on one microbatch. Its *kind* is ``F`` (forward), ``B``
(full backward), ``I`` (backward for the stage's inputs only) or ``W`` (backward for its weights
only); a ``B`` does the work of an ``I`` and a ``W``. This file knows nothing of devices or orders.
"""

from __future__ import annotations

from typing import NamedTuple

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One pass of one stage on one microbatch.

    >>> Action(2, "F", 0)
    2F0
    >>> Action(2, "F", 0) == Action(stage=2, kind="F", microbatch=0)
    True
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __str__(self) -> str:
        return repr(self)
