"""The timeline as a picture: bars over time, and what each device holds, as SVG, PNG or PDF.

One row per device; a bar for each action with its microbatch's number where it fits, and below
the bars a silhouette of what the device holds. Transfers that take time are thin lines. Uses
matplotlib's objects without pyplot: no window, no global state.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import KINDS, Timeline
from jaxpipe.view.palette import KIND_NAMES, color, text_color
from jaxpipe.view.units import counted, nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png", ".pdf")
INK, FAINT, IDLE, HELD = "#222222", "#777777", "#F1F1F1", "#CC79A7"
BAR = (0.06, 0.64)  # within a row of height 1: the bars' upper and lower edge
STRIP = (0.70, 0.94)  # the same of the silhouette
MOST_LINES = 600  # transfers drawn


def save_timeline(
    timeline: Timeline, path: str | PathLike[str], *, title: str | None = None
) -> None:
    """Draw ``timeline`` to ``path``; its ending (.svg, .png, .pdf) says how.

    ``title``: above the picture, by default the schedule's name. Raises `ScheduleError` for
    another ending.
    """
    ending = Path(fspath(path)).suffix.lower()
    if ending not in ENDINGS:
        raise ScheduleError(
            f"A timeline cannot be saved as {fspath(path)!r}: give a name that ends in "
            f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}."
        )
    from matplotlib import rc_context

    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[ending]
    figure = draw(timeline, title=title)
    with rc_context({"svg.hashsalt": "jaxpipe"}):  # equal timelines give equal files
        figure.savefig(path, format=ending[1:], dpi=160, metadata=dated, facecolor="white")


def draw(timeline: Timeline, *, title: str | None = None) -> Figure:
    """The picture as a matplotlib figure, not attached to any window."""
    from matplotlib.figure import Figure

    schedule = timeline.schedule
    P = schedule.devices
    most = max((len(order) for order in schedule.orders), default=1)
    labels = _labels(timeline)
    needed = 2.6 + sum(0.45 + 0.068 * len(label) for label, _ in labels)  # the legend's inches
    width = max(min(24.0, max(9.0, 3.2 + 0.17 * most)), needed)
    top, bottom, row = 0.88, 0.74, 0.62 if P <= 8 else 0.48
    height = top + bottom + row * P
    figure = Figure(figsize=(width, height))
    left, right = 0.85, 1.15
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, row * P / height)
    )
    origin = min((begun[0] for begun in timeline.starts if begun), default=0.0)
    _frame(axes, timeline, origin)
    _bars(figure, axes, timeline, origin)
    _transfers(axes, timeline, origin)
    _held(axes, timeline, origin)
    name = title if title is not None else (schedule.name or "schedule")
    figure.text(
        left / width, 1 - 0.30 / height, name, size=15, weight="bold", color=INK, va="center"
    )
    figure.text(
        left / width, 1 - 0.60 / height, _totals(timeline), size=9.5, color=INK, va="center"
    )
    _legend(figure, labels, (1 - right / width, 0.17 / height))
    return figure


def _totals(timeline: Timeline) -> str:
    schedule = timeline.schedule
    v = schedule.stages / schedule.devices
    counts = [(schedule.devices, "device"), (schedule.microbatches, "microbatch")]
    if v != 1:
        counts.insert(1, (schedule.stages, "stage"))
    sizes = ", ".join(counted(number, what) for number, what in counts)
    return (
        f"{sizes}  ·  makespan {timeline.makespan:.5g}  ·  span {timeline.span:.5g}  ·  "
        f"bubble {100 * timeline.idle:.1f} %  ·  peak {_amount(timeline, max(timeline.peak))}"
    )


def _amount(timeline: Timeline, held: float) -> str:
    """What is held, in bytes where the graph comes from a model, else in its own unit."""
    return nbytes(held) if timeline.graph.lines else f"{held:g}"


def _frame(axes: Axes, timeline: Timeline, origin: float) -> None:
    from matplotlib.ticker import MaxNLocator

    P, whole = timeline.schedule.devices, timeline.makespan or 1.0
    axes.set_xlim(0, whole)
    axes.set_ylim(P, 0)
    axes.set_yticks([d + sum(BAR) / 2 for d in range(P)])
    axes.set_yticklabels([f"device {d}" for d in range(P)], size=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=8, colors=FAINT, length=3, width=0.6)
    axes.tick_params(axis="y", length=0)
    unit = f"time, in units of {timeline.time_unit}" if timeline.time_unit else "time"
    axes.set_xlabel(unit, size=8.5, color=FAINT, labelpad=3, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.spines["bottom"].set_linewidth(0.6)
    for device in range(P):
        axes.axhspan(device + BAR[0], device + BAR[1], color=IDLE, lw=0, zorder=0)
        axes.annotate(
            f"bubble {100 * timeline.bubble[device]:.1f} %",
            (1, device + sum(BAR) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            size=8,
            color=INK,
            va="center",
        )


def _bars(figure: Figure, axes: Axes, timeline: Timeline, origin: float) -> None:
    """One collection of bars for each colour, and numbers on those that have room for them."""
    from matplotlib.collections import PolyCollection

    schedule = timeline.schedule
    boxes: dict[str, list[Any]] = {}
    inches = axes.get_position().width * figure.get_figwidth()
    per_unit = 72 * inches / (timeline.makespan or 1.0)  # points
    digits = len(str(schedule.microbatches - 1))
    for device, order in enumerate(schedule.orders):
        own = schedule.chunks(device)
        low, high = device + BAR[0], device + BAR[1]
        times = zip(order, timeline.starts[device], timeline.ends[device], strict=True)
        for action, start, end in times:
            if end <= start:
                continue
            fill = color(action.kind, own.index(action.stage), len(own))
            x, y = start - origin, end - origin
            boxes.setdefault(fill, []).append([(x, low), (y, low), (y, high), (x, high)])
            room = (end - start) * per_unit
            if room >= 5.0 * digits + 2:
                axes.text(
                    (x + y) / 2,
                    (low + high) / 2,
                    str(action.microbatch),
                    size=min(8.5, room / (0.62 * digits + 0.3)),
                    color=text_color(fill),
                    ha="center",
                    va="center_baseline",
                    clip_on=True,
                )
    shortest = min((e - s for b, n in zip(timeline.starts, timeline.ends, strict=True)
                    for s, e in zip(b, n, strict=True) if e > s), default=1.0)  # fmt: skip
    edge = min(0.8, 0.15 * shortest * per_unit)
    for fill, polygons in boxes.items():
        axes.add_collection(
            PolyCollection(polygons, facecolors=fill, edgecolors="white", linewidths=edge, zorder=2)
        )


def _transfers(axes: Axes, timeline: Timeline, origin: float) -> None:
    from matplotlib.collections import LineCollection

    slow = [t for t in timeline.transfers if t.end > t.start]
    if not slow or len(slow) > MOST_LINES:
        return
    lines = []
    for t in slow:
        down = t.to > t.source
        begin = t.source + (BAR[1] if down else BAR[0])
        end = t.to + (BAR[0] if down else BAR[1])
        lines.append([(t.start - origin, begin), (t.end - origin, end)])
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=0.5, alpha=0.55, zorder=3))


def _held(axes: Axes, timeline: Timeline, origin: float) -> None:
    """Silhouettes on one scale for all devices, with each device's peak."""
    most = max(timeline.peak, default=0) or 1.0
    whole = timeline.makespan
    for device, curve in enumerate(timeline.held):
        base, high = device + STRIP[1], STRIP[1] - STRIP[0]
        times = [max(time - origin, 0.0) for time, _ in curve] + [whole]
        level = [base - high * held / most for _, held in curve]
        level.append(level[-1] if level else base)
        axes.fill_between(times, level, base, step="post", color=HELD, alpha=0.55, lw=0, zorder=1)
        axes.annotate(
            f"peak {_amount(timeline, timeline.peak[device])}",
            (1, device + sum(STRIP) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            size=8,
            color="#A0527F",
            va="center",
        )


def _labels(timeline: Timeline) -> list[tuple[str, str]]:
    """The legend's texts and colours."""
    schedule = timeline.schedule
    present = {action.kind for action in schedule.actions()}
    v = max((len(schedule.chunks(d)) for d in range(schedule.devices)), default=1)
    labels = [(f"{kind} {KIND_NAMES[kind]}", color(kind)) for kind in KINDS if kind in present]
    if v > 1:
        labels.append(("lighter: later chunks", color("F", v - 1, v)))
    return [*labels, ("memory held", HELD)]


def _legend(figure: Figure, labels: list[tuple[str, str]], anchor: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=fill, alpha=0.55 if fill == HELD else None, label=text)
        for text, fill in labels
    ]
    figure.legend(
        handles=handles,
        loc="center right",
        bbox_to_anchor=anchor,
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
        borderaxespad=0.0,
    )
