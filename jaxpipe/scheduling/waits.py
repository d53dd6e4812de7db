"""Who waits for whom in a schedule that deadlocks: the shortest cycle of waits.

A device *waits* at an action b for an action c whose result b needs. It waits for ever if c stands
at or behind an action of c's device that waits in turn, and so on round to b or behind it. The
length of such a cycle is its number of waits, of which each names two actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.dataflow import positions
from jaxpipe.scheduling.schedule import Schedule

Wait = tuple[Action, Action]  # (at this action, for that one)


def shortest_cycle(
    schedule: Schedule, needs: Mapping[Action, Mapping[Action, int]], ran: Sequence[int]
) -> list[Wait]:
    """The cycle with the fewest waits, among those the one whose first wait comes earliest.

    ``ran``: per device the number of its actions that could run; the rest is stuck. Being further
    back on a device only ever adds waits, so for each first wait and each device the furthest
    position that k waits lead to is all there is to know.
    """
    where = positions(schedule)
    stuck = [order[ran[device] :] for device, order in enumerate(schedule.orders)]
    # reach[d][p, e]: furthest position on device e awaited by the first p + 1 stuck actions of d
    reach = []
    for order in stuck:
        table = np.full((len(order), schedule.devices), -1)
        for row, action in enumerate(order):
            for need in needs[action]:
                device, position = where[need]
                table[row, device] = max(table[row, device], position - ran[device])
        reach.append(np.maximum.accumulate(table) if len(order) else table)

    waits = sorted(
        (where[action][1] - ran[where[action][0]], where[action][0], action, need)
        for order in stuck
        for action in order
        for need in needs[action]
        if where[need][1] >= ran[where[need][0]]
    )
    home = np.array([device for _, device, _, _ in waits])
    depth = np.array([row for row, _, _, _ in waits])
    furthest = np.full((len(waits), schedule.devices), -1)
    for number, (_, _, _, need) in enumerate(waits):
        device, position = where[need]
        furthest[number, device] = position - ran[device]
    every = np.arange(len(waits))
    for length in range(1, len(waits) + 1):
        closed = furthest[every, home] >= depth
        if closed.any():
            _, _, action, need = waits[int(np.argmax(closed))]
            return _trace(schedule, needs, ran, where, (action, need), length)
        following = furthest.copy()
        for device, table in enumerate(reach):
            here = furthest[:, device] >= 0
            rows = table[furthest[here, device]]
            following[here] = np.maximum(following[here], rows)
        furthest = following
    raise AssertionError("a stuck schedule has a cycle of waits")


def _trace(
    schedule: Schedule,
    needs: Mapping[Action, Mapping[Action, int]],
    ran: Sequence[int],
    where: Mapping[Action, tuple[int, int]],
    first: Wait,
    length: int,
) -> list[Wait]:
    """The waits of a cycle of ``length`` that begins with ``first``: a breadth-first search."""
    home, target = where[first[0]]
    paths: list[list[Wait]] = [[first]]
    seen = {first}
    for _ in range(length - 1):
        longer = []
        for path in paths:
            device, position = where[path[-1][1]]
            for action in schedule.orders[device][ran[device] : position + 1]:
                for need in needs[action]:
                    stuck = where[need][1] >= ran[where[need][0]]
                    if stuck and (action, need) not in seen:
                        seen.add((action, need))
                        longer.append([*path, (action, need)])
        paths = longer
    return next(
        path for path in paths if where[path[-1][1]][0] == home and where[path[-1][1]][1] >= target
    )
