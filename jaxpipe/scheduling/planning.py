"""How `plan` makes instruction lists: one order of the whole step, written to every device's list.

The schedule is run in unit time (`dataflow.unit_steps`). A Run stands at its action's start; a
transfer stands, in the lists of both devices, at the end of the action that made the value, before
whatever starts at that moment. Both lists are parts of this one order, so transfers that block
until both devices have come to them always finish; and no device takes a value in before it must,
so few receive slots are held. A value goes after the last that a device does with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.dataflow import (
    DURATION,
    Flow,
    flows,
    is_empty,
    needs_of,
    unit_steps,
)
from jaxpipe.scheduling.graph import Graph
from jaxpipe.scheduling.instructions import (
    Accumulate,
    Free,
    Instruction,
    Plan,
    Recv,
    Run,
    Send,
)
from jaxpipe.scheduling.schedule import Schedule

Held = tuple[int, int, int]  # (device, value, microbatch)


@dataclass
class _Writer:
    """The lists as they grow, with what each device holds."""

    graph: Graph
    lists: list[list[Instruction]]
    live: list[list[int]]
    walk: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def add(self, device: int, instruction: Instruction, change: int = 0) -> None:
        self.walk.append((device, len(self.lists[device])))
        self.lists[device].append(instruction)
        self.held[device] += change
        self.live[device].append(self.held[device])

    def free(self, held: Held) -> None:
        device, value, microbatch = held
        self.add(device, Free(value, microbatch), -self.graph.values[value].nbytes)


def make_plan(schedule: Schedule, graph: Graph, accumulate: str) -> Plan:
    """The body of `plan`."""
    if accumulate not in ("index", "arrival"):
        raise ScheduleError(f'accumulate is "index" or "arrival", not {accumulate!r}.')
    found = list(flows(schedule, graph))
    reads, makes, sends, uses = _uses(schedule, graph, found)
    pending = _pending(schedule, graph) if accumulate == "index" else {}
    gradients = graph.gradient_nbytes or (0,) * graph.stages
    writer = _Writer(
        graph,
        lists=[[] for _ in range(schedule.devices)],
        live=[[] for _ in range(schedule.devices)],
        held=[0] * schedule.devices,
    )
    links: dict[tuple[int, int], None] = {}

    def run(device: int, action: Action) -> None:
        read = [(device, v, action.microbatch) for v in reads.get(action, ())]
        made = [(device, v, action.microbatch) for v in makes.get(action, ())]
        uses.subtract(read)
        done = [held for held in read if not uses[held]]
        # A W gives no cotangent whose buffers could take the place of one it read.
        may_reuse = action.kind != "W"
        reuse = tuple(v for _, v, _ in done if may_reuse and graph.values[v].reusable)
        change = sum(graph.values[v].nbytes for _, v, _ in made)
        change -= sum(graph.values[v].nbytes for v in reuse)
        turns = pending.get(action)
        if turns == ():
            change += gradients[action.stage]
        writer.add(device, Run(action, reuse, turns != ()), change)
        for microbatch in (turns or ())[1:]:
            writer.add(device, Accumulate(action.stage, microbatch), -gradients[action.stage])
        for held in done:
            if held[1] not in reuse:
                writer.free(held)
        for held in made:
            if not uses[held]:
                writer.free(held)

    def transfer(value: int, microbatch: int, source: int, to: int) -> None:
        links.setdefault((source, to))
        writer.add(source, Send(value, microbatch, to))
        writer.add(to, Recv(value, microbatch, source), graph.values[value].nbytes)
        held = (source, value, microbatch)
        uses[held] -= 1
        if not uses[held]:
            writer.free(held)

    for event in _events(schedule, graph, found, sends):
        if len(event) == 2:
            run(*event)
        else:
            transfer(*event)
    return Plan(
        schedule=schedule,
        graph=graph,
        lists=tuple(map(tuple, writer.lists)),
        walk=tuple(writer.walk),
        live=tuple(map(tuple, writer.live)),
        peaks=tuple(max(live, default=0) for live in writer.live),
        links=tuple(links),
    )


def _uses(
    schedule: Schedule, graph: Graph, found: list[Flow]
) -> tuple[dict[Action, list[int]], dict[Action, list[int]], list[list[int]], Counter[Held]]:
    """What each action reads and makes, where each flow goes, and how often each copy is used.

    A use is a Run that reads, or a Send. A result that is kept has one use that never comes.
    """
    reads: dict[Action, list[int]] = {}
    makes: dict[Action, list[int]] = {}
    sends: list[list[int]] = []
    uses: Counter[Held] = Counter()
    placement = schedule.placement
    for value, microbatch, producer, readers, _ in found:
        source = placement[producer.stage]
        makes.setdefault(producer, []).append(value)
        there: list[int] = []
        for reader in readers:
            reads.setdefault(reader, []).append(value)
            device = placement[reader.stage]
            uses[device, value, microbatch] += 1
            if device != source and device not in there:
                there.append(device)
        uses[source, value, microbatch] += len(there) + graph.values[value].kept
        sends.append(there)
    return reads, makes, sends, uses


def _events(
    schedule: Schedule, graph: Graph, found: list[Flow], sends: list[list[int]]
) -> list[tuple]:
    """(device, action) of each Run and (value, microbatch, source, to) of each transfer, in order.

    At equal times transfers come first: what starts at that moment may read them.
    """
    start = unit_steps(schedule, graph, needs_of(schedule, graph, found)).start
    keyed: list[tuple[int, int, tuple]] = []
    for action, time in start.items():
        if not is_empty(action, graph):
            keyed.append((time, 1, (schedule.placement[action.stage], action)))
    for (value, microbatch, producer, _, _), there in zip(found, sends, strict=True):
        end = start[producer] + DURATION[producer.kind]
        source = schedule.placement[producer.stage]
        for to in there:
            keyed.append((end, 0, (value, microbatch, source, to)))
    return [event for _, _, event in sorted(keyed)]


def _pending(schedule: Schedule, graph: Graph) -> dict[Action, tuple[int, ...]]:
    """For each action with weight gradients the microbatches that are added once it has run.

    Its own comes first; none where an earlier microbatch has not come yet.
    """
    turns: dict[Action, tuple[int, ...]] = {}
    next_turn = [0] * schedule.stages
    early: list[set[int]] = [set() for _ in range(schedule.stages)]
    for action in schedule.actions():
        stage, kind, microbatch = action
        if kind not in "BW" or (stage, "W") in graph.empty:
            continue
        early[stage].add(microbatch)
        first = next_turn[stage]
        while next_turn[stage] in early[stage]:
            early[stage].remove(next_turn[stage])
            next_turn[stage] += 1
        turns[action] = tuple(range(first, next_turn[stage]))
    return turns
