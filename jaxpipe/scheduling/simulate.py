"""`simulate`: when each action of a schedule runs under given costs.

Each device runs its actions in its order; an action starts when its device is free and all that it
reads has arrived. Since devices and links keep fixed orders, every time is a maximum of sums of
times before it, and one walk that follows the dependences finds them all without a clock.

This file knows how transfers run beside computation (`_walk`) and how they run in turn with it
(`_walk_instructions`); what a `Timeline` tells about the times found is in `timeline.py`.
"""

from __future__ import annotations

from typing import NoReturn

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.costs import Costs, costs_or_default
from jaxpipe.scheduling.graph import Graph, Pass, graph_or_chain
from jaxpipe.scheduling.instructions import Recv, Run, Send, plan
from jaxpipe.scheduling.passes import PassTable, pass_table
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.scheduling.timeline import Timeline, Transfer


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    graph: Graph | None = None,
    dispatch: str = "fixed",
) -> Timeline:
    """Run a schedule under costs and say when each action starts and ends.

    ``costs``: times of passes and transfers, `Costs()` if not given. ``graph``: the dependences
    and sizes of a model's stages, a chain if not given; its empty passes take no time.
    ``dispatch``: only ``"fixed"``, the order as written.

    >>> from jaxpipe.scheduling import F, B, schedule
    >>> @schedule
    ... def gpipe(device, devices, microbatches):
    ...     yield from (F(i) for i in range(microbatches))
    ...     yield from (B(i) for i in range(microbatches))
    >>> simulate(gpipe(devices=4, microbatches=8)).makespan  # (8 + 4 - 1) * (1 + 2)
    33.0

    Raises `ScheduleError` if the schedule is incomplete, misplaced or deadlocks (as
    ``schedule.check`` does), or the costs do not fit its stages and devices.
    """
    if dispatch != "fixed":
        raise ScheduleError(
            f"simulate(dispatch={dispatch!r}) is not available: only dispatch='fixed', which runs "
            f"each device's actions in the order of the schedule."
        )
    costs = costs_or_default(costs)
    graph = graph_or_chain(graph, schedule.stages)
    if costs.overlap:
        return _walk(schedule, costs, graph)
    return _walk_instructions(schedule, costs, graph)


class Durations:
    """The time of every action and crossing of a schedule under costs."""

    def __init__(self, schedule: Schedule, costs: Costs, graph: Graph, table: PassTable) -> None:
        M = schedule.microbatches
        self.by_kind = costs.times(schedule.stages, len(set(schedule.placement)), empty=graph.empty)
        self.factors = costs.factors(schedule.stages, M)
        self.crossings = [
            costs.transfer((c.source, c.to), c.edge, graph.values[c.value].nbytes)
            if c.sent
            else (0.0, 0.0)
            for c in table.crossings
        ]

    def of(self, stage: int, kind: str, microbatch: int) -> float:
        """The time of one action."""
        time = self.by_kind[kind][stage]
        if self.factors is not None:
            time *= float(self.factors[kind][stage, microbatch])
        return time


def _walk(schedule: Schedule, costs: Costs, graph: Graph) -> Timeline:
    """Times where transfers run beside computation, each link one queue in order of making."""
    P, S, M = schedule.devices, schedule.stages, schedule.microbatches
    forward_only = schedule.forward_only
    table = pass_table(graph, schedule.placement, forward_only=forward_only)
    durations = Durations(schedule, costs, graph, table)
    done: list[float | None] = [None] * (3 * S * M)  # by slot and microbatch: its end
    arrived: list[float | None] = [None] * (len(table.crossings) * M)
    waiting: dict[int, int] = {}  # crossing and microbatch -> the device that waits for it
    link_free: dict[tuple[int, int], float] = {}
    clock = [0.0] * P
    starts: list[list[float]] = [[] for _ in range(P)]
    ends: list[list[float]] = [[] for _ in range(P)]
    transfers: list[Transfer] = []
    runnable = list(range(P - 1, -1, -1))
    while runnable:
        device = runnable.pop()
        order, begun, ended = schedule.orders[device], starts[device], ends[device]
        time = clock[device]
        for position in range(len(begun), len(order)):
            stage, kind, m = order[position]
            of: Pass = (stage, kind)
            if schedule.placement[stage] != device:
                _refuse(schedule, graph)
            ready, missing = time, -1
            for crossing in table.remote[of]:
                arrival = arrived[crossing * M + m]
                if arrival is None:
                    missing = crossing * M + m
                    break
                if arrival > ready:
                    ready = arrival
            if missing >= 0:
                waiting[missing] = device
                break
            for number in table.local[of]:
                if done[number * M + m] is None:  # comes later in this device's own order
                    _refuse(schedule, graph)
            time = ready + durations.of(stage, kind, m)
            begun.append(ready)
            ended.append(time)
            for number in table.fills[of]:
                if done[number * M + m] is not None:
                    _refuse(schedule, graph)
                done[number * M + m] = time
            for crossing in table.sends[of]:
                value, source, to, _, sent = table.crossings[crossing]
                busy, latency = durations.crossings[crossing]
                arrival = time
                if sent:
                    start = max(time, link_free.get((source, to), 0.0))
                    link_free[source, to] = start + busy
                    arrival = start + busy + latency
                    transfers.append(Transfer(value, m, source, to, start, arrival))
                arrived[crossing * M + m] = arrival
                waiter = waiting.pop(crossing * M + m, None)
                if waiter is not None:
                    runnable.append(waiter)
        clock[device] = time
    if any(len(begun) < len(order) for begun, order in zip(starts, schedule.orders, strict=True)):
        _refuse(schedule, graph)
    if done.count(None) not in (0, 2 * S * M if forward_only else 0):
        _refuse(schedule, graph)
    return Timeline(
        schedule, graph, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(transfers)
    )


def _walk_instructions(schedule: Schedule, costs: Costs, graph: Graph) -> Timeline:
    """Times where a transfer holds both devices: they meet at its place in their lists."""
    schedule.check(graph)
    lists = plan(schedule, graph).lists
    table = pass_table(graph, schedule.placement, forward_only=schedule.forward_only)
    durations = Durations(schedule, costs, graph, table)
    times = {
        (c.value, c.source, c.to): sum(durations.crossings[number])
        for number, c in enumerate(table.crossings)
    }
    P = schedule.devices
    clock, at = [0.0] * P, [0] * P
    starts: list[list[float]] = [[] for _ in range(P)]
    ends: list[list[float]] = [[] for _ in range(P)]
    transfers: list[Transfer] = []
    reached: dict[tuple[int, int, int, int], int] = {}  # a transfer -> the device that waits in it
    runnable = list(range(P - 1, -1, -1))

    def pass_empty(device: int, until: Action | None) -> None:
        """Enter the empty passes, which no list has, that come before ``until``."""
        order = schedule.orders[device]
        while len(starts[device]) < len(order) and order[len(starts[device])] != until:
            starts[device].append(clock[device])
            ends[device].append(clock[device])

    while runnable:
        device = runnable.pop()
        while at[device] < len(lists[device]):
            step = lists[device][at[device]]
            if isinstance(step, Run):
                pass_empty(device, step.action)
                starts[device].append(clock[device])
                clock[device] += durations.of(*step.action)
                ends[device].append(clock[device])
            elif isinstance(step, (Send, Recv)):
                source, to = (device, step.to) if isinstance(step, Send) else (step.source, device)
                key = (step.value, step.microbatch, source, to)
                other = reached.pop(key, None)
                if other is None:
                    reached[key] = device
                    break
                begin = max(clock[source], clock[to])
                clock[source] = clock[to] = begin + times[step.value, source, to]
                transfers.append(
                    Transfer(step.value, step.microbatch, source, to, begin, clock[to])
                )
                at[other] += 1
                runnable.append(other)
            at[device] += 1
    if any(position < len(steps) for position, steps in zip(at, lists, strict=True)):
        raise ScheduleError(f"The transfers of {schedule.name or 'this schedule'} never all meet.")
    for device in range(P):
        pass_empty(device, None)
    return Timeline(
        schedule, graph, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(transfers)
    )


def _refuse(schedule: Schedule, graph: Graph) -> NoReturn:
    """Raise the sentence of the checker for a schedule that cannot be run."""
    schedule.check(graph)
    raise ScheduleError(
        f"The schedule {schedule.name or ''} passes the check but cannot be simulated; please "
        f"report it with its text."
    )
