"""Which action of a schedule makes which value, who reads it, and when that lets each one run.

A `Graph` speaks of passes; a schedule runs a stage's backward of a microbatch either as I and W or
as one B that stands for both. `flows` resolves the one to the other: a `Flow` is one value of one
microbatch with the actions that make and read it. `unit_steps` runs the schedule in unit time.
This file raises no errors of its own; it is for schedules that are complete (`check` sees to it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.graph import Graph, Pass
from jaxpipe.scheduling.schedule import Schedule

DURATION = {"F": 1, "I": 1, "W": 1, "B": 2}


class Flow(NamedTuple):
    """Value ``value`` (an index into ``graph.values``) of one microbatch, made by ``producer``.

    ``readers`` are in the order of the graph, without passes that the graph calls empty (they read
    nothing, though they wait: ``waiting`` has them too).
    """

    value: int
    microbatch: int
    producer: Action
    readers: tuple[Action, ...]
    waiting: tuple[Action, ...]


class Steps(NamedTuple):
    """``start`` of each action that can run, and per device how many of its actions ran."""

    start: dict[Action, int]
    ran: tuple[int, ...]


def positions(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Where each action stands: (device, position). Of a repeated action, the first place."""
    where: dict[Action, tuple[int, int]] = {}
    for device, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            where.setdefault(action, (device, position))
    return where


def is_empty(action: Action, graph: Graph) -> bool:
    """Whether ``action`` has no work to do in ``graph``."""
    stage, kind, _ = action
    if kind == "B":
        return (stage, "I") in graph.empty and (stage, "W") in graph.empty
    return (stage, kind) in graph.empty


def flows(schedule: Schedule, graph: Graph) -> Iterator[Flow]:
    """Every value of every microbatch that exists when ``schedule`` runs ``graph``.

    A value that passes only between the I and the W of one B does not exist; neither does one
    whose producer does not run.
    """
    present = set(schedule.actions())
    microbatches = sorted({action.microbatch for action in present})

    def runs(of: Pass, microbatch: int) -> Action | None:
        stage, kind = of
        if kind != "F" and (whole := Action(stage, "B", microbatch)) in present:
            return whole
        action = Action(stage, kind, microbatch)
        return action if action in present else None

    for index, value in enumerate(graph.values):
        if value.producer in graph.empty:
            continue
        for microbatch in microbatches:
            producer = runs(value.producer, microbatch)
            if producer is None:
                continue
            waiting: dict[Action, bool] = {}  # -> whether it reads
            for reader in value.readers:
                action = runs(reader, microbatch)
                if action is not None and action != producer:
                    waiting[action] = waiting.get(action, False) or reader not in graph.empty
            internal = producer.kind == "B" and any(
                reader[0] == producer.stage for reader in value.readers
            )
            if not waiting and internal and not value.kept:
                continue
            readers = tuple(action for action, reads in waiting.items() if reads)
            yield Flow(index, microbatch, producer, readers, tuple(waiting))


def needs_of(
    schedule: Schedule, graph: Graph, found: Iterable[Flow] | None = None
) -> dict[Action, dict[Action, int]]:
    """For each action the actions whose results it waits for, and one value that it waits for.

    ``found``: the flows, where they are at hand.
    """
    needs: dict[Action, dict[Action, int]] = {action: {} for action in schedule.actions()}
    for flow in flows(schedule, graph) if found is None else found:
        for reader in flow.waiting:
            needs[reader].setdefault(flow.producer, flow.value)
    return needs


def unit_steps(
    schedule: Schedule, graph: Graph, needs: Mapping[Action, Mapping[Action, int]]
) -> Steps:
    """Run every device's order as early as dependences allow: F, I, W take 1 and B takes 2.

    Empty passes take 0. Transfers take no time. Stops when nothing can run any more; an order that
    was not finished then waits for ever.
    """
    start: dict[Action, int] = {}
    end: dict[Action, int] = {}
    free = [0] * schedule.devices
    ran = [0] * schedule.devices
    waiters: dict[Action, list[int]] = {}
    runnable = list(range(schedule.devices))
    while runnable:
        device = runnable.pop()
        order = schedule.orders[device]
        while ran[device] < len(order):
            action = order[ran[device]]
            now = free[device]
            missing = None
            for need in needs[action]:
                done = end.get(need)
                if done is None:
                    missing = need
                    break
                now = max(now, done)
            if missing is not None:
                waiters.setdefault(missing, []).append(device)
                break
            start[action] = now
            end[action] = free[device] = now + (
                0 if is_empty(action, graph) else DURATION[action.kind]
            )
            ran[device] += 1
            runnable.extend(waiters.pop(action, ()))
    return Steps(start, tuple(ran))
