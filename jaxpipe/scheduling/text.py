"""Schedules as text: the line form, and excerpts of it for error messages.

The line form has one line per device, actions separated by spaces; an idle device is ``-``. A
line that begins with ``#`` is a comment.
Reading is anchored: what is not wholly an action is refused with its line and column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.schedule import Schedule

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")
IDLE = "-"


def to_action(text: str) -> Action:
    """Read one action; raises `ScheduleError` unless all of ``text`` is one.

    >>> to_action("2F0")
    2F0
    """
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"{text!r} is not an action <stage><kind><microbatch> with a kind of F, B, I, W, "
            "such as 2F0"
        )
    return Action(int(found[1]), found[2], int(found[3]))


def to_text(schedule: Schedule) -> str:
    """The line form, without a newline at the end."""
    return "\n".join(" ".join(map(str, order)) or IDLE for order in schedule.orders)


def from_text(
    text: str, *, placement: Sequence[int] | None = None, name: str = "", source: str = ""
) -> Schedule:
    """Read the line form, skipping lines of comment (``#``) and blank lines around it.

    ``source`` names the file in errors.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"{source}the text of a schedule is a str, not {text!r}.")
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if not line.lstrip().startswith("#")
    ]
    while lines and not lines[0][1].strip():
        del lines[0]
    while lines and not lines[-1][1].strip():
        del lines[-1]
    if not lines:
        raise ScheduleError(f"{source}the text of a schedule is empty; give one line per device.")
    orders = [tuple(_line(line, f"{source}line {number}")) for number, line in lines]
    return from_orders(orders, placement=placement, name=name, source=source, row="line")


def _line(line: str, where: str) -> Iterator[Action]:
    words = list(re.finditer(r"\S+", line))
    if not words:
        raise ScheduleError(f"{where} is empty; an idle device is written {IDLE}.")
    if line.strip() == IDLE:
        return
    for word in words:
        try:
            yield to_action(word[0])
        except ScheduleError as error:
            column = word.start() + 1
            raise ScheduleError(
                f"{where}, column {column}: {error}:\n  {line}\n  "
                f"{' ' * word.start()}{'^' * len(word[0])}"
            ) from None


def from_orders(
    orders: Sequence[tuple[Action, ...]],
    *,
    placement: Sequence[int] | None,
    name: str,
    source: str = "",
    row: str = "line",
) -> Schedule:
    """A schedule of orders alone: sizes and, unless given, the placement follow from the actions.

    ``row`` is what the source calls a device's order; it counts from 1.
    """
    first: dict[int, tuple[int, Action]] = {}
    microbatches = 0
    for device, order in enumerate(orders):
        for action in order:
            microbatches = max(microbatches, action.microbatch + 1)
            seen = first.setdefault(action.stage, (device, action))
            if seen[0] != device and placement is None:
                raise ScheduleError(
                    f"{source}{action} stands on {row} {device + 1} and {seen[1]} on {row} "
                    f"{seen[0] + 1}, but one device holds a stage. Correct one of them, or give "
                    "the placement."
                )
    if not first:
        raise ScheduleError(f"{source}no {row} has an action.")
    stages = max(first) + 1 if placement is None else len(placement)
    if placement is None:
        if len(first) < stages:  # the first gap is at most len(first)
            gap = next(stage for stage in range(stages) if stage not in first)
            raise ScheduleError(
                f"{source}stage {gap} has no action though stage {stages - 1} has, so its device "
                "is unknown. Add its actions, or give the placement."
            )
        placement = [first[stage][0] for stage in range(stages)]
    return Schedule(len(orders), stages, microbatches, tuple(placement), tuple(orders), name)


def excerpt(schedule: Schedule, marks: Mapping[int, int], *, around: int = 5) -> str:
    """The rows of the devices in ``marks`` and their neighbours, near the marked positions.

    ``marks``: device -> position. Positions beyond the end mark the place behind the last action.
    """
    shown = sorted({d + e for d in marks for e in (-1, 0, 1)} & set(range(schedule.devices)))
    middle = min(marks.values())
    lines = []
    for device in shown:
        order = schedule.orders[device]
        center = marks.get(device, min(middle, len(order)))
        low, high = max(0, center - around), center + around + 1
        cells = list(map(str, order[low:high])) or [IDLE]
        head = f"  device {device} | " + ("… " if low else "")
        lines.append(head + " ".join(cells) + (" …" if high < len(order) else ""))
        if device in marks:
            before = sum(len(cell) + 1 for cell in cells[: center - low])
            width = len(cells[center - low]) if center - low < len(cells) else 1
            lines.append(" " * (len(head) + before) + "^" * width)
    return "\n".join(lines)
