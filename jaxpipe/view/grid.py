"""The time grid: a schedule in the terminal, one row per device, one cell per unit of time.

A cell shows the action that starts in it, as kind and microbatch (``F0``), with the stage in front
(``2F0``) where a device has several; dashes lead to its end and a dot is an idle cell. Rows come
from a `Timeline`, so costs and transfers show. Colours are used on terminals only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from jaxpipe.scheduling import Schedule, Timeline, simulate
from jaxpipe.view.palette import color, text_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CELLS_PER_ACTION = 4  # where exact times need more cells than that, times are rounded
ROUNDED_CELLS_PER_ACTION = 2


class Cell(NamedTuple):
    """``text`` over ``width`` units of time, filled with ``fill`` (None where idle)."""

    text: str
    width: int
    fill: str | None


def unit_of(timeline: Timeline) -> float:
    """The time of one cell: the longest that divides all times, or a rough one if that is tiny.

    >>> unit_of(simulate(Schedule.parse("0F0 0B0")))
    1.0
    """
    origin = _origin(timeline)
    edges: set[float] = set()
    lengths: set[float] = set()
    for begun, ended in zip(timeline.starts, timeline.ends, strict=True):
        edges.update(time - origin for time in (*begun, *ended))
        lengths.update(end - start for start, end in zip(begun, ended, strict=True) if end > start)
    whole = timeline.makespan
    if not lengths:
        return whole or 1.0
    scale = max(lengths)
    parts = {Fraction(edge / scale).limit_denominator(64) for edge in edges}
    common = math.lcm(*(part.denominator for part in parts))
    unit = scale * math.gcd(*(int(part * common) for part in parts)) / common
    most = max(len(order) for order in timeline.schedule.orders)
    if whole / unit <= CELLS_PER_ACTION * most + 64:
        return unit
    return whole / (ROUNDED_CELLS_PER_ACTION * most)


def _origin(timeline: Timeline) -> float:
    return min((begun[0] for begun in timeline.starts if begun), default=0.0)


def cells(timeline: Timeline, unit: float) -> list[list[Cell]]:
    """The rows of the grid, equally long. Actions that take no time have no cell."""
    schedule = timeline.schedule
    many = schedule.stages > schedule.devices
    origin = _origin(timeline)
    rows = []
    for device, order in enumerate(schedule.orders):
        row: list[Cell] = []
        at = 0
        own = schedule.chunks(device)
        times = zip(order, timeline.starts[device], timeline.ends[device], strict=True)
        for action, start, end in times:
            if end <= start:
                continue
            first = max(at, round((start - origin) / unit))
            behind = max(first + 1, round((end - origin) / unit))
            row += [Cell(".", 1, None)] * (first - at)
            text = str(action) if many else f"{action.kind}{action.microbatch}"
            fill = color(action.kind, own.index(action.stage), len(own))
            row.append(Cell(text, behind - first, fill))
            at = behind
        rows.append(row)
    lengths = [sum(cell.width for cell in row) for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        row += [Cell(".", 1, None)] * (max(lengths) - length)
    return rows


def render_grid(shown: Schedule | Timeline) -> str:
    """The grid as plain text.

    >>> print(render_grid(Schedule.parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1")))
    device 0  F0 F1 .  .  B0--- .  B1---
    device 1  .  F0 B0--- F1 B1--- .  .
    """
    timeline = shown if isinstance(shown, Timeline) else simulate(shown)
    rows = cells(timeline, unit_of(timeline))
    width = _cell_width(rows)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"device {device:>{label}}  {''.join(_plain(cell, width) for cell in row)}".rstrip()
        for device, row in enumerate(rows)
    )


def print_grid(shown: Schedule | Timeline, *, console: Console | None = None) -> None:
    """Print the grid: coloured and broken to the terminal's width, or plain where it is piped."""
    from rich.console import Console

    console = Console() if console is None else console
    if not console.is_terminal:
        console.file.write(render_grid(shown) + "\n")
        return
    timeline = shown if isinstance(shown, Timeline) else simulate(shown)
    for line in _colored(timeline, console.width):
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def _colored(timeline: Timeline, columns: int) -> Iterator[Text]:
    """Blocks of lines, each a header with times and a row for every device."""
    from rich.text import Text

    unit = unit_of(timeline)
    rows = cells(timeline, unit)
    width = _cell_width(rows, around=2)
    label = len(f"device {len(rows) - 1}  ")
    per_block = max(1, (columns - label) // width)
    length = max((sum(cell.width for cell in row) for row in rows), default=0)
    for begin in range(0, length, per_block):
        end = min(begin + per_block, length)
        if begin:
            yield Text()
        yield Text(_header(begin, end, unit, width, label), style="dim")
        for device, row in enumerate(rows):
            line = Text(f"device {device}".ljust(label))
            at = 0
            for cell in row:
                first, behind = max(at, begin), min(at + cell.width, end)
                if first < behind:
                    text = cell.text if first == at else ""
                    _append(line, text, (behind - first) * width, cell.fill)
                at += cell.width
            yield line


def _append(line: Text, text: str, columns: int, fill: str | None) -> None:
    if fill is None:
        line.append("·".ljust(columns), style="dim")
        return
    line.append(f" {text}"[: columns - 1].ljust(columns - 1), style=f"{text_color(fill)} on {fill}")
    line.append(" ")


def _header(begin: int, end: int, unit: float, width: int, label: int) -> str:
    """Times above the cells, as many as have room."""
    marks = "time".ljust(label)
    for cell in range(begin, end):
        column = label + (cell - begin) * width
        if len(marks) <= column and cell % 4 == begin % 4:
            marks = marks.ljust(column) + f"{cell * unit:g} "
    return marks


def _cell_width(rows: list[list[Cell]], around: int = 1) -> int:
    """Columns of one cell, so that every text fits the cells it covers, with spaces around it."""
    needed = (-(-(len(c.text) + around) // c.width) for row in rows for c in row if c.fill)
    return max(needed, default=2)


def _plain(cell: Cell, width: int) -> str:
    columns = cell.width * width
    if cell.fill is None or cell.width == 1:
        return cell.text.ljust(columns)
    return cell.text.ljust(columns - 1, "-") + " "
