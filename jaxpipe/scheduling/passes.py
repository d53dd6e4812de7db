"""`PassTable`: what each pass waits for and whom it feeds, for one graph and one placement.

A *slot* numbers a pass: ``3 * stage`` plus 0, 1, 2 for F, I, W; a ``B`` fills the slots of I and W
together. A *crossing* is a value with a device other than its producer's that reads it: it is sent
there once, however many passes read it. Slots and crossings are small integers, so that walks over
long schedules index flat lists. This file knows no orders and no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.graph import Graph, Pass

SLOT = {"F": 0, "I": 1, "W": 2}


class Crossing(NamedTuple):
    """Value ``value`` (an index into ``graph.values``) goes from device ``source`` to ``to``.

    ``edge``: from which stage to which. ``sent``: False where only passes without work wait for
    it; they read nothing, so nothing is sent.
    """

    value: int
    source: int
    to: int
    edge: tuple[int, int]
    sent: bool


@dataclass(frozen=True)
class PassTable:
    """Dependences, by pass; ``B`` passes are entered beside F, I and W.

    ``fills``: slots that are done when the pass is. ``local``: slots that it reads on its own
    device. ``remote``: crossings that it waits for. ``sends``: crossings that it starts.
    """

    fills: dict[Pass, tuple[int, ...]]
    local: dict[Pass, tuple[int, ...]]
    remote: dict[Pass, tuple[int, ...]]
    sends: dict[Pass, tuple[int, ...]]
    crossings: tuple[Crossing, ...]


def slot(of: Pass) -> int:
    """The number of a pass of kind F, I or W."""
    return 3 * of[0] + SLOT[of[1]]


def pass_table(graph: Graph, placement: tuple[int, ...], *, forward_only: bool) -> PassTable:
    """The dependences of a graph whose stages are placed on devices.

    ``forward_only``: values that only backward passes read are then neither awaited nor sent.
    """
    if graph.stages != len(placement):
        raise ScheduleError(
            f"The graph has {graph.stages} stages but the schedule has {len(placement)}. "
            f"Make the schedule for {graph.stages} stages, or cut the model into {len(placement)}."
        )
    kinds = "F" if forward_only else "FIW"
    local: dict[Pass, dict[int, None]] = {(s, k): {} for s in range(graph.stages) for k in "FIW"}
    remote: dict[Pass, dict[int, None]] = {(s, k): {} for s in range(graph.stages) for k in "FIW"}
    sends: dict[Pass, list[int]] = {(s, k): [] for s in range(graph.stages) for k in "FIW"}
    crossings: list[Crossing] = []
    if not forward_only:
        for s in range(graph.stages):  # also where a graph passes nothing from one to the other
            local[s, "I"][slot((s, "F"))] = None
            local[s, "W"][slot((s, "F"))] = None
            local[s, "W"][slot((s, "I"))] = None
    for index, value in enumerate(graph.values):
        if value.producer in graph.empty:
            continue
        source = placement[value.producer[0]]
        there: dict[int, int] = {}
        for reader in sorted(value.readers, key=graph.empty.__contains__):  # those that read first
            if reader[1] not in kinds:
                continue
            to = placement[reader[0]]
            if to == source:
                local[reader][slot(value.producer)] = None
                continue
            if to not in there:
                there[to] = len(crossings)
                edge = (value.producer[0], reader[0])
                crossings.append(Crossing(index, source, to, edge, reader not in graph.empty))
                sends[value.producer].append(there[to])
            remote[reader][there[to]] = None
    fills: dict[Pass, tuple[int, ...]] = {
        (s, k): (slot((s, k)),) for s in range(graph.stages) for k in "FIW"
    }
    table = PassTable(
        fills,
        {of: tuple(slots) for of, slots in local.items()},
        {of: tuple(numbers) for of, numbers in remote.items()},
        {of: tuple(numbers) for of, numbers in sends.items()},
        tuple(crossings),
    )
    for s in range(graph.stages):
        _join_backward(table, s)
    return table


def _join_backward(table: PassTable, s: int) -> None:
    """Enter B of stage s: what I and W wait for except each other, and what both start."""
    own = (slot((s, "I")), slot((s, "W")))
    table.fills[s, "B"] = own
    both = (*table.local[s, "I"], *table.local[s, "W"])
    table.local[s, "B"] = tuple(dict.fromkeys(number for number in both if number not in own))
    table.remote[s, "B"] = tuple(dict.fromkeys((*table.remote[s, "I"], *table.remote[s, "W"])))
    table.sends[s, "B"] = (*table.sends[s, "I"], *table.sends[s, "W"])
