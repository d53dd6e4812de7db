"""List scheduling: let time run, and start on every free device what is preferred.

Whenever a device is free it starts, of the actions whose inputs have arrived, the one that ranks
first. *In flight* on a device are its chunks of microbatches between F and the end of W (or B);
a *slot* is room for one of them. Each pass (stage and kind) takes its microbatches in ascending
order. Slots are kept for later chunks, or first chunks would take all and wait for them for ever.
This file knows the dependences and the limits, and no particular schedule.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple, NoReturn

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.costs import Costs
from jaxpipe.scheduling.graph import Graph, Pass, graph_or_chain
from jaxpipe.scheduling.passes import PassTable, pass_table
from jaxpipe.scheduling.schedule import chunks_of

Orders = tuple[tuple[Action, ...], ...]

# Times are whole ticks, so that equal times are equal: a longest pass is this many of them, a
# number that halves, thirds ... twelfths divide.
TICKS = 1024 * 27 * 25 * 7 * 11

TIES = ("turns", "alternate", "oldest", "deepest")


@dataclass(frozen=True)
class Task:
    """What to put in order: sizes, placement, kinds in order of preference, limits, graph.

    ``limits``: slots, by device. ``reserved``: slots that are kept for each later chunk, by device
    (1 if None).
    """

    devices: int
    microbatches: int
    placement: tuple[int, ...]
    kinds: tuple[str, ...]
    limits: tuple[int, ...] | None
    reserved: tuple[int, ...] | None
    graph: Graph | None

    @cached_property
    def table(self) -> PassTable:
        """The dependences."""
        forward_only = self.kinds == ("F",)
        return pass_table(self.known_graph, self.placement, forward_only=forward_only)

    @cached_property
    def known_graph(self) -> Graph:
        """The graph, a chain if none was given."""
        return graph_or_chain(self.graph, len(self.placement))

    def ticks(self, costs: Costs) -> tuple[dict[Pass, int], list[tuple[int, int]]]:
        """Times of passes and of crossings (busy, latency) in ticks."""
        graph, S = self.known_graph, len(self.placement)
        by_kind = costs.times(S, len(set(self.placement)), empty=graph.empty)
        longest = max(max(by_kind[kind]) for kind in self.kinds) or 1.0
        unit = TICKS / longest
        passes = {(s, k): round(by_kind[k][s] * unit) for k in self.kinds for s in range(S)}
        crossings = []
        for value, source, to, edge, sent in self.table.crossings:
            nbytes = graph.values[value].nbytes
            busy, latency = costs.transfer((source, to), edge, nbytes) if sent else (0.0, 0.0)
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


class _Candidate(NamedTuple):
    """A pass of a device, with all that the choice among ready ones asks of it."""

    of: Pass
    chunk: int
    rank: int
    local: tuple[int, ...]
    remote: tuple[int, ...]
    cap: int | None  # of a forward: the most that this and earlier chunks may hold together


def list_schedule(
    task: Task, times: dict[Pass, int], crossings: list[tuple[int, int]], tie: str
) -> Ordered:
    """One run of list scheduling."""
    run = _Run(task, times, crossings, tie)
    for device in range(task.devices):
        run.start_best(device, 0)
    while run.events:
        now = run.events[0][0]
        touched: set[int] = set()
        while run.events and run.events[0][0] == now:
            _, _, device, of, crossing = heapq.heappop(run.events)
            touched.add(device)
            if of is None:
                run.arrived[crossing] += 1
            else:
                touched.update(run.finish(device, of, now))
        for device in sorted(touched):
            if run.free[device]:
                run.start_best(device, now)
    if any(m < task.microbatches for m in run.following.values()):
        _stuck(task, run.following, run.orders)
    spans = [end - begin for begin, end in zip(run.first, run.ended, strict=True)]
    return Ordered(tuple(map(tuple, run.orders)), (max(run.ended), max(spans)))


class _Run:
    """The state of devices and links while time runs."""

    def __init__(
        self, task: Task, times: dict[Pass, int], crossings: list[tuple[int, int]], tie: str
    ) -> None:
        self.task, self.times, self.crossings, self.tie = task, times, crossings, tie
        P, S = task.devices, len(task.placement)
        self.candidates = tuple(tuple(_candidates(task, device)) for device in range(P))
        self.filler = "W" if task.kinds[-1] == "W" else ""
        self.releases = "W" if "W" in task.kinds else "B"
        self.following = {(s, k): 0 for s in range(S) for k in task.kinds}  # next microbatch
        self.done = [0] * (3 * S)  # by slot: of how many microbatches
        self.arrived = [0] * len(crossings)
        self.link_free: dict[tuple[int, int], int] = {}
        self.held = [[0] * len(own) for own in chunks_of(task.placement, P)]
        self.chunk = {s: c for own in chunks_of(task.placement, P) for c, s in enumerate(own)}
        self.free = [True] * P
        self.last: list[Pass | None] = [None] * P  # of the last action that was no filler
        self.orders: list[list[Action]] = [[] for _ in range(P)]
        self.first, self.ended = [0] * P, [0] * P
        # (time, number, device, pass that ends or None, crossing that arrives)
        self.events: list[tuple[int, int, int, Pass | None, int]] = []
        self.numbers = count()

    def start_best(self, device: int, now: int) -> None:
        """Start the action that ranks first among those that can start now, if there is one."""
        best: tuple[tuple[int, ...], Pass] | None = None
        done, arrived, M = self.done, self.arrived, self.task.microbatches
        for each in self.candidates[device]:
            m = self.following[each.of]
            if m == M:
                continue
            for number in each.local:
                if done[number] <= m:
                    break
            else:
                for number in each.remote:
                    if arrived[number] <= m:
                        break
                else:
                    if each.cap is None or self.admits(device, each.chunk, each.cap):
                        found = (self.urgency(device, each, m), each.of)
                        if best is None or found < best:
                            best = found
        if best is None:
            return
        of = best[1]
        stage, kind = of
        if not self.orders[device]:
            self.first[device] = now
        self.orders[device].append(Action(stage, kind, self.following[of]))
        self.following[of] += 1
        self.held[device][self.chunk[stage]] += kind == "F"
        self.free[device] = False
        if kind != self.filler:
            self.last[device] = of
        self.ended[device] = now + self.times[of]
        heapq.heappush(self.events, (self.ended[device], next(self.numbers), device, of, -1))

    def admits(self, device: int, chunk: int, cap: int) -> bool:
        """Whether a forward of this chunk leaves later chunks the slots that are theirs."""
        held, limits = self.held[device], self.task.limits
        if limits is None:
            return True
        later = len(held) - 1 - chunk
        return sum(held) + later < limits[device] and sum(held[: chunk + 1]) < cap

    def urgency(self, device: int, each: _Candidate, m: int) -> tuple[int, ...]:
        """The rank of an action that can start; the least is started."""
        if self.tie == "oldest":
            return each.rank, m, -each.chunk
        if self.tie == "deepest":
            return each.rank, -each.chunk, m
        stage, kind = each.of
        last = self.last[device]
        again = last is not None and (stage == last[0] if self.tie == "turns" else kind == last[1])
        return kind == self.filler, again, each.rank, m, -each.chunk

    def finish(self, device: int, of: Pass, now: int) -> list[int]:
        """End an action and send what it made; returns the devices where that arrives at once."""
        table = self.task.table
        self.free[device] = True
        if of[1] == self.releases:
            self.held[device][self.chunk[of[0]]] -= 1
        for number in table.fills[of]:
            self.done[number] += 1
        at_once = []
        for crossing in table.sends[of]:
            _, source, to, _, is_sent = table.crossings[crossing]
            busy, latency = self.crossings[crossing]
            gone = now
            if is_sent:
                gone = max(now, self.link_free.get((source, to), 0)) + busy
                self.link_free[source, to] = gone
            if gone + latency == now:
                self.arrived[crossing] += 1
                at_once.append(to)
            else:
                event = (gone + latency, next(self.numbers), to, None, crossing)
                heapq.heappush(self.events, event)
        return at_once


def _candidates(task: Task, device: int) -> Iterator[_Candidate]:
    """The passes of a device, with their dependences and caps."""
    own = chunks_of(task.placement, task.devices)[device]
    for chunk, stage in enumerate(own):
        for rank, kind in enumerate(task.kinds):
            of = (stage, kind)
            cap = None
            if kind == "F" and task.limits is not None:
                kept = 1 if task.reserved is None else task.reserved[device]
                cap = task.limits[device] - kept * (len(own) - 1 - chunk)
            yield _Candidate(of, chunk, rank, task.table.local[of], task.table.remote[of], cap)


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
