"""List scheduling: let time run, and start on every free device what is preferred.

Whenever a device is free it starts, of the actions whose inputs have arrived, the one that ranks
first. *In flight* on a device are its chunks of microbatches between F and the end of W (or B);
a *slot* is room for one of them. Each pass (stage and kind) takes its microbatches in ascending
order. This file knows the dependences and the limits, and no particular schedule.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.costs import Costs
from jaxpipe.scheduling.graph import Graph, Pass
from jaxpipe.scheduling.passes import PassTable, pass_table
from jaxpipe.scheduling.schedule import chunks_of

Orders = tuple[tuple[Action, ...], ...]

# Times are whole ticks, so that equal times are equal: a longest pass is this many of them, a
# number that halves, thirds ... twelfths divide.
TICKS = 1024 * 27 * 25 * 7 * 11

TIES = ("turns", "oldest", "deepest")


@dataclass(frozen=True)
class Task:
    """What to put in order: sizes, placement, kinds in order of preference, limits, graph."""

    devices: int
    microbatches: int
    placement: tuple[int, ...]
    kinds: tuple[str, ...]
    limits: tuple[int, ...] | None
    graph: Graph | None

    @cached_property
    def table(self) -> PassTable:
        """The dependences."""
        forward_only = self.kinds == ("F",)
        return pass_table(self.known_graph, self.placement, forward_only=forward_only)

    @cached_property
    def known_graph(self) -> Graph:
        """The graph, a chain if none was given."""
        return Graph.chain(len(self.placement)) if self.graph is None else self.graph

    def ticks(self, costs: Costs) -> tuple[dict[Pass, int], list[tuple[int, int]]]:
        """Times of passes and of crossings (busy, latency) in ticks."""
        graph, S = self.known_graph, len(self.placement)
        by_kind = costs.times(S, self.devices, empty=graph.empty)
        longest = max(max(by_kind[kind]) for kind in self.kinds) or 1.0
        unit = TICKS / longest
        passes = {(s, k): round(by_kind[k][s] * unit) for k in self.kinds for s in range(S)}
        crossings = []
        for value, source, to, edge in self.table.crossings:
            nbytes = graph.values[value].nbytes
            busy, latency = costs.transfer((source, to), edge, nbytes)
            crossings.append((round(busy * unit), round(latency * unit)))
        return passes, crossings


@dataclass(frozen=True)
class Ordered:
    """Orders that list scheduling found; ``quality`` is (makespan, span) in ticks."""

    orders: Orders
    quality: tuple[int, int]


def try_ties(task: Task, costs: Costs, ties: Sequence[str]) -> list[Ordered]:
    """The orders by each tie-break; stops early at one that no order can beat."""
    times, crossings = task.ticks(costs)
    least = _least_makespan(task, times)
    found: list[Ordered] = []
    for tie in ties:
        found.append(list_schedule(task, times, crossings, tie))
        if found[-1].quality[0] <= least:
            break
    return found


def _least_makespan(task: Task, times: dict[Pass, int]) -> int:
    """No order is faster: each device works only after a first forward has come to it."""
    before = [0] * len(task.placement)
    for i, j in task.known_graph.edges:
        before[j] = max(before[j], before[i] + times[i, "F"])
    bounds = []
    for own in chunks_of(task.placement, task.devices):
        if own:
            work = task.microbatches * sum(times[s, k] for s in own for k in task.kinds)
            bounds.append(min(before[s] for s in own) + work)
    return max(bounds)


def list_schedule(
    task: Task, times: dict[Pass, int], crossings: list[tuple[int, int]], tie: str
) -> Ordered:
    """One run of list scheduling."""
    M, table, kinds = task.microbatches, task.table, task.kinds
    chunks = chunks_of(task.placement, task.devices)
    following = {(s, k): 0 for s in range(len(task.placement)) for k in kinds}  # next microbatch
    done = [0] * (3 * len(task.placement))  # by slot: how many microbatches
    arrived = [0] * len(table.crossings)
    link_free: dict[tuple[int, int], int] = {}
    held = [0] * task.devices
    free = [True] * task.devices
    last = [-1] * task.devices  # the stage of the last action that was no filler
    orders: list[list[Action]] = [[] for _ in range(task.devices)]
    first = [-1] * task.devices
    ended = [0] * task.devices
    rank = {kind: n for n, kind in enumerate(kinds)}
    filler = "W" if kinds[-1] == "W" else ""
    releases = "W" if "W" in kinds else "B"
    events: list[
        tuple[int, int, int, Pass | None, int]
    ] = []  # time, number, device, pass, crossing
    numbers = iter(range(10**18))

    def ready(of: Pass, m: int) -> bool:
        return all(done[number] > m for number in table.local[of]) and all(
            arrived[number] > m for number in table.remote[of]
        )

    def admits(device: int, chunk: int) -> bool:
        if task.limits is None:
            return True
        return held[device] + len(chunks[device]) - chunk <= task.limits[device]

    def urgency(device: int, chunk: int, of: Pass, m: int) -> tuple[int, ...]:
        stage, kind = of
        if tie == "oldest":
            return rank[kind], m, -chunk
        if tie == "deepest":
            return rank[kind], -chunk, m
        return int(kind == filler), int(stage == last[device]), rank[kind], m, -chunk

    def start_best(device: int, now: int) -> None:
        best: tuple[tuple[int, ...], Pass] | None = None
        for chunk, stage in enumerate(chunks[device]):
            for kind in kinds:
                of = (stage, kind)
                m = following[of]
                if m == M or not ready(of, m) or (kind == "F" and not admits(device, chunk)):
                    continue
                candidate = (urgency(device, chunk, of, m), of)
                if best is None or candidate < best:
                    best = candidate
        if best is None:
            return
        of = best[1]
        orders[device].append(Action(*of, following[of]))
        following[of] += 1
        held[device] += of[1] == "F"
        free[device] = False
        if of[1] != filler:
            last[device] = of[0]
        if first[device] < 0:
            first[device] = now
        ended[device] = now + times[of]
        heapq.heappush(events, (ended[device], next(numbers), device, of, -1))

    for device in range(task.devices):
        start_best(device, 0)
    while events:
        now = events[0][0]
        touched: set[int] = set()
        while events and events[0][0] == now:
            _, _, device, of, crossing = heapq.heappop(events)
            touched.add(device)
            if of is None:
                arrived[crossing] += 1
                continue
            free[device] = True
            held[device] -= of[1] == releases
            for number in table.fills[of]:
                done[number] += 1
            for crossing in table.sends[of]:
                _, source, to, _ = table.crossings[crossing]
                busy, latency = crossings[crossing]
                sent = max(now, link_free.get((source, to), 0)) + busy
                link_free[source, to] = sent
                if sent + latency == now:
                    arrived[crossing] += 1
                    touched.add(to)
                else:
                    heapq.heappush(events, (sent + latency, next(numbers), to, None, crossing))
        for device in sorted(touched):
            if free[device]:
                start_best(device, now)
    if any(m < M for m in following.values()):
        _stuck(task, following, orders)
    spans = [end - begin for begin, end in zip(first, ended, strict=True)]
    return Ordered(tuple(map(tuple, orders)), (max(ended), max(spans)))


def _stuck(task: Task, following: dict[Pass, int], orders: list[list[Action]]) -> NoReturn:
    """Say what each device holds and what it therefore refuses."""
    sentences = []
    for device, order in enumerate(orders):
        gone = {(a.stage, a.microbatch) for a in order if a.kind in "BW"}
        holds = [a for a in order if a.kind == "F" and (a.stage, a.microbatch) not in gone]
        waits = [
            Action(s, "F", following[s, "F"])
            for s in chunks_of(task.placement, task.devices)[device]
            if following[s, "F"] < task.microbatches
        ]
        if waits and task.limits is not None:
            sentences.append(
                f"device {device} may hold {task.limits[device]} and holds "
                f"{', '.join(map(str, holds)) or 'nothing'}; it still has to run "
                f"{', '.join(map(str, waits))}"
            )
    raise ScheduleError(
        "List scheduling is stuck: " + "; ".join(sentences) + ". Raise in_flight on these devices, "
        "or check that the graph has no cycle."
    )
