"""Timing by interleaved pairs: programs that are compared take turns, so that they share the
machine's moods, and what is reported is the median of the ratios of a turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Spread:
    """Quartiles of a sample."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """The quartiles of at least two numbers.

        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(low=1.5, median=2.0, high=2.5)
        """
        low, _, high = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(low, statistics.median(sample), high)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def seconds(run: Callable[[], Any]) -> float:
    """The time of one call, until all its results are ready."""
    begun = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begun


def interleaved(
    programs: Mapping[str, Callable[[], Any]], *, turns: int, untimed: int = 3
) -> dict[str, list[float]]:
    """Seconds of each program in each of ``turns`` turns; in every other turn the last goes first.

    The first ``untimed`` turns compile and warm up, and are left out.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(untimed + turns):
        names = list(programs) if turn % 2 else list(reversed(programs))
        for name in names:
            took = seconds(programs[name])
            if turn >= untimed:
                times[name].append(took)
    return times


def ratios(times: Sequence[float], to: Sequence[float]) -> Spread:
    """The spread of the ratios of pairs."""
    return Spread.of([ours / theirs for ours, theirs in zip(times, to, strict=True)])
