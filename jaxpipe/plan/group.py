"""Grouping: how a model's segments become stages.

A model is marked once, at every block; a schedule wants a number of stages. With as many segments
as stages they map one to one; with more, consecutive segments are grouped so that the dearest
stage is as cheap as can be. This file knows no devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.capture.trace import Segment
from jaxpipe.errors import PipelineError


def group(
    segments: Sequence[Segment],
    stages: int,
    *,
    explicit: Sequence[int] | None = None,
    unused_marks: Sequence[str] = (),
) -> tuple[int, ...]:
    """How many consecutive segments each stage takes.

    Args:
      segments: of the traced model, in program order.
      stages: how many the schedule wants.
      explicit: the user's own counts, taken as they are.
      unused_marks: source lines of boundaries whose results nothing reads, for the message.

    Returns:
      ``stages`` positive counts that sum to ``len(segments)``; their largest cost is minimal, and
      among such groupings cuts stand as early as possible.

    Raises:
      PipelineError: for too few segments, or counts that do not fit the model or the schedule.

    >>> from jaxpipe.capture.trace import Segment
    >>> group([Segment(i, "", None, cost) for i, cost in enumerate([1, 1, 1, 3])], 2)
    (3, 1)
    """
    n = len(segments)
    if explicit is not None:
        return _explicit(segments, stages, tuple(explicit))
    if n < stages:
        raise PipelineError(
            f"the schedule wants {stages} stages but the model has {n} segment"
            f"{'s' if n != 1 else ''} ({n - 1} stage_boundary marks):\n{describe(segments)}\n"
            f"Mark at least {stages - 1} places with jaxpipe.stage_boundary (for example every "
            "block), or choose fewer devices or a schedule with fewer stages."
            + _of_unused(unused_marks)
        )
    return balance([s.flops for s in segments], stages)


def _of_unused(marks: Sequence[str]) -> str:
    if not marks:
        return ""
    count = len(marks)
    lines = ", ".join(dict.fromkeys(marks))
    return (
        f" What {count} more mark{'s' if count > 1 else ''} returned goes into no result ({lines})"
        ": write x = jaxpipe.stage_boundary(x) and use x from there on."
    )


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` consecutive non-empty runs of ``costs`` with the least largest sum.

    >>> balance([1, 1, 1, 1, 1], 2)
    (2, 3)
    """
    n = len(costs)
    total = [0.0]
    for c in costs:
        total.append(total[-1] + c)
    # best[k][i]: the least largest sum of costs[i:] in k runs.
    best = [[float("inf")] * (n + 1) for _ in range(parts + 1)]
    best[0][n] = 0.0
    for k in range(1, parts + 1):
        for i in range(n - k, -1, -1):
            best[k][i] = min(
                max(total[j] - total[i], best[k - 1][j]) for j in range(i + 1, n - k + 2)
            )
    sizes, i, limit = [], 0, best[parts][0]
    for k in range(parts, 0, -1):
        j = next(
            j
            for j in range(i + 1, n - k + 2)
            if max(total[j] - total[i], best[k - 1][j]) <= limit * (1 + 1e-12)
        )
        sizes.append(j - i)
        i = j
    return tuple(sizes)


def _explicit(segments: Sequence[Segment], stages: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    n = len(segments)
    if not counts or any(not isinstance(c, int) or isinstance(c, bool) or c < 1 for c in counts):
        raise PipelineError(
            f"stages={list(counts)}: give a list of positive whole numbers, how many segments "
            "each stage takes"
        )
    if len(counts) != stages:
        raise PipelineError(
            f"stages={list(counts)} lists {len(counts)} stages but the schedule wants {stages}; "
            "give one count for each stage of the schedule"
        )
    if sum(counts) != n:
        raise PipelineError(
            f"stages={list(counts)} sums to {sum(counts)} but the model has {n} segments:\n"
            f"{describe(segments)}\nThe counts must sum to {n}."
        )
    return counts


def describe(segments: Sequence[Segment]) -> str:
    """One line for each segment: number, name of its boundary, source lines."""
    return "\n".join(
        f"  segment {s.index}{f' ({s.name})' if s.name else ''}: {s.lines}" for s in segments
    )
