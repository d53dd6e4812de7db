"""`Timeline`: when each action of a schedule ran, and what follows from that.

Times have the unit of the costs that were simulated (or of a measurement); *makespan*, *span* and
*bubble* are defined at the properties of that name. This file does not know how times are found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import NamedTuple

from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.graph import Graph
from jaxpipe.scheduling.instructions import Plan, Run, plan
from jaxpipe.scheduling.passes import pass_table
from jaxpipe.scheduling.schedule import Schedule


class Transfer(NamedTuple):
    """Value ``value`` (an index into ``graph.values``) of a microbatch on its way.

    ``start``: when it leaves device ``source``; ``end``: when it has arrived on device ``to``.
    """

    value: int
    microbatch: int
    source: int
    to: int
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """Start and end of every action of a schedule.

    ``starts[d][n]`` and ``ends[d][n]`` belong to action ``schedule.orders[d][n]``. ``time_unit``
    says what one unit of time is, where that is known.

    >>> from jaxpipe.scheduling import Schedule, simulate
    >>> simulate(Schedule.parse("0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"))
    Timeline(2 devices, 2 microbatches: makespan 9, span 9, bubble 33.3 %, peak 2 1)
    """

    schedule: Schedule
    graph: Graph
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    transfers: tuple[Transfer, ...] = field(default=())
    time_unit: str = ""

    @cached_property
    def start(self) -> dict[Action, float]:
        """When each action starts."""
        return self._by_action(self.starts)

    @cached_property
    def end(self) -> dict[Action, float]:
        """When each action ends."""
        return self._by_action(self.ends)

    def _by_action(self, times: tuple[tuple[float, ...], ...]) -> dict[Action, float]:
        pairs = zip(self.schedule.orders, times, strict=True)
        return {a: t for order, each in pairs for a, t in zip(order, each, strict=True)}

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all devices: a step with a barrier."""
        first = min((times[0] for times in self.starts if times), default=0.0)
        last = max((times[-1] for times in self.ends if times), default=0.0)
        return last - first

    @property
    def spans(self) -> tuple[float, ...]:
        """From the first start to the last end on each device."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(ended[-1] - begun[0] if begun else 0.0 for begun, ended in pairs)

    @property
    def span(self) -> float:
        """The longest of `spans`: a step whose devices need not wait for one another at its end.

        The figure of the zero-bubble papers (arXiv 2401.10241).
        """
        return max(self.spans, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each device spends in actions."""
        return tuple(sum(ended) - sum(begun) for begun, ended in self._device_times())

    def _device_times(self) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        return list(zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> tuple[float, ...]:
        """The idle share of the makespan on each device, from 0 to 1."""
        whole = self.makespan
        return tuple(max(1 - busy / whole, 0.0) if whole else 0.0 for busy in self.busy)

    @property
    def idle(self) -> float:
        """The idle share of the makespan over all devices, from 0 to 1: the mean of `bubble`."""
        return sum(self.bubble) / len(self.bubble)

    @cached_property
    def plan(self) -> Plan:
        """The instruction lists of the schedule, whose counts of what is held are used here."""
        return plan(self.schedule, self.graph)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most that each device holds at once, in the graph's unit (bytes, if it has them).

        With the chain that is assumed without a model this counts, per device, the stages and
        microbatches between F and the end of B or W. Found by the planner that orders transfers
        and frees, so it is what the runtime holds.
        """
        return tuple(self.plan.peaks)

    @cached_property
    def held(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """What each device holds over time: steps (time, held from then on), by device.

        In the graph's unit; several steps at one time stand in their order. By the instruction
        lists: what a pass makes counts from its start, what is received from when there is room.
        """
        curves = []
        for steps, live in zip(self.plan.lists, self.plan.live, strict=True):
            now = 0.0
            curve = [(now, 0.0)]
            for step, held in zip(steps, live, strict=True):
                if isinstance(step, Run):
                    now = self.start[step.action]
                if held != curve[-1][1]:
                    curve.append((now, held))
                if isinstance(step, Run):
                    now = self.end[step.action]
            curves.append(tuple(curve))
        return tuple(curves)

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """Actions, first to last, each of which delayed the next: what to shorten to gain time.

        Walks back from an action that ends last; each action's predecessor is whichever of its
        device's previous action and of the actions that it reads from let it start last.
        """
        schedule, M = self.schedule, self.schedule.microbatches
        table = pass_table(self.graph, schedule.placement, forward_only=schedule.forward_only)
        arrivals = {(t.value, t.microbatch, t.to): t.end for t in self.transfers}
        position = {
            a: (d, n) for d, order in enumerate(schedule.orders) for n, a in enumerate(order)
        }
        makers: dict[int, Action] = {}  # slot and microbatch -> the action that fills it
        for action in position:
            for number in table.fills[action.stage, action.kind]:
                makers[number * M + action.microbatch] = action
        senders = {
            crossing: of for of, crossings in table.sends.items() if of[1] != "B"
            for crossing in crossings
        }  # fmt: skip
        if not position:
            return ()
        path = [max(position, key=lambda a: self.ends[position[a][0]][position[a][1]])]
        while True:
            last = path[-1]
            device, n = position[last]
            causes: list[tuple[float, int, Action]] = []
            if n:
                causes.append((self.ends[device][n - 1], 1, schedule.orders[device][n - 1]))
            for crossing in table.remote[last.stage, last.kind]:
                stage, kind = senders[crossing]
                maker = makers[(3 * stage + "FIW".index(kind)) * M + last.microbatch]
                value, _, to, _, sent = table.crossings[crossing]
                known = (value, last.microbatch, to)
                arrival = arrivals[known] if sent else self.end[maker]
                causes.append((arrival, 0, maker))
            if not causes:
                return tuple(reversed(path))
            path.append(max(causes, key=lambda cause: cause[:2])[2])

    def save(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """Draw the timeline to ``path``; its ending says how: ``.svg``, ``.png`` or ``.pdf``."""
        from jaxpipe.view.timeline import save_timeline

        save_timeline(self, path, title=title)

    def __repr__(self) -> str:
        name = f"{self.schedule.name}, " if self.schedule.name else ""
        peak = " ".join(f"{held:g}" for held in self.peak)
        return (
            f"Timeline({name}{self.schedule.devices} devices, {self.schedule.microbatches} "
            f"microbatches: makespan {self.makespan:g}, span {self.span:g}, "
            f"bubble {100 * self.idle:.1f} %, peak {peak})"
        )

    def __str__(self) -> str:
        """One line for each device, and the totals."""
        heading = "peak bytes" if self.graph.lines else "peak"
        lines = [f"device      busy    bubble      span{heading:>16}"]
        rows = zip(self.busy, self.bubble, self.spans, self.peak, strict=True)
        for device, (busy, bubble, span, peak) in enumerate(rows):
            share = f"{100 * bubble:.1f} %"
            lines.append(f"{device:>6}{busy:>10.4g}{share:>10}{span:>10.4g}{_number(peak):>16}")
        lines.append(
            f"makespan {self.makespan:.6g}, span {self.span:.6g}, bubble {100 * self.idle:.1f} %"
        )
        if self.time_unit:
            lines.append(f"unit of time: {self.time_unit}")
        return "\n".join(lines)


def _number(peak: float) -> str:
    """Units as they are, and bytes in full: 7.5, 11,481,520."""
    return f"{peak:,.0f}" if peak >= 1e4 else f"{peak:.6g}"
