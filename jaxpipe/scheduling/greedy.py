"""Schedules from a preference, and the choice of the fastest of several.

`greedy` makes a schedule function of a ranking of kinds and of limits on what is in flight;
`fastest` keeps the best of several schedule functions under given costs. This file tries and
compares; how one order is found is in `list_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import placements
from jaxpipe.scheduling.actions import KINDS
from jaxpipe.scheduling.costs import Costs, costs_or_default
from jaxpipe.scheduling.graph import Graph
from jaxpipe.scheduling.kinds import Kind
from jaxpipe.scheduling.list_scheduling import TIES, Orders, Task, try_ties
from jaxpipe.scheduling.schedule import Schedule, chunks_of
from jaxpipe.scheduling.schedule_function import ScheduleFunction, parameters_of
from jaxpipe.scheduling.simulate import simulate


def greedy(
    *,
    prefer: Sequence[Kind | str],
    in_flight: Callable[..., int] | None = None,
    reserve: Callable[..., int] | None = None,
    placement: placements.Placement = placements.linear,
    ties: Sequence[str] = TIES,
    name: str = "greedy",
    doc: str | None = None,
) -> ScheduleFunction:
    """Make a schedule function of a preference among kinds of actions.

    ``prefer``: the kinds, best first: ``(B, F)`` is 1F1B's rule, ``(I, F, W)`` lets weights fill
    what would be idle. ``in_flight(device, devices, **options)``: how many chunks a device may
    hold between F and W (or B); without it there is no limit. ``reserve``, called likewise: how
    many of these slots each later chunk can count on, 1 if not given. A forward of a device's
    c-th of v chunks is started only if one slot for each later chunk stays free and the chunks up
    to this one hold no more than ``in_flight - (v - 1 - c) * reserve``: else first chunks take
    the slots that last chunks need, and everything waits.

    ``ties``: rules among ready actions, all tried, the best in simulation kept: ``"oldest"``
    microbatch, ``"deepest"`` chunk, ``"turns"`` (not twice the same stage if another can run) or
    ``"alternate"`` (not twice the same kind). In the last two a W that ranks last stays
    last: it only fills what would be idle.

    The schedule function takes the options of ``in_flight`` and ``placement``, and ``costs``
    (default: `Costs()`) and ``graph`` (default: a chain) to order for; under given costs the
    result is never slower than the order for the default costs.

    >>> from jaxpipe.scheduling import B, F
    >>> lazy = greedy(prefer=(B, F), in_flight=lambda device, devices: devices - device)
    >>> print(lazy(devices=2, microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Raises `ScheduleError` if ``prefer`` or ``ties`` make no sense, and, naming what holds the
    slots, if a limit is too low for any order.
    """
    kinds = _kinds(prefer)
    for tie in ties:
        if tie not in TIES:
            raise ScheduleError(f"greedy(ties=...) knows {', '.join(TIES)}, not {tie!r}.")
    if not ties:
        raise ScheduleError(f"greedy(ties=()) leaves nothing to try; name some of {TIES}.")
    if reserve is not None and in_flight is None:
        raise ScheduleError("greedy(reserve=...) keeps some of the slots that in_flight= gives.")
    given, of_limits = [each for each in (in_flight, reserve) if each is not None], {}
    for each in given:
        of_limits.update(parameters_of(each, skip=2)[0])

    def build(
        devices: int,
        microbatches: int,
        placement: tuple[int, ...],
        *,
        costs: Costs | None = None,
        graph: Graph | None = None,
        **options: Any,
    ) -> Orders:
        held = None if kinds == ("F",) else in_flight  # forwards alone hold nothing
        limits = _by_device(held, devices, options)
        reserved = _by_device(reserve, devices, options)
        if limits is not None:
            _check_limits(name, limits, reserved, chunks_of(placement, devices))
        task = Task(devices, microbatches, placement, kinds, limits, reserved, graph)
        found = [order for under in _once(costs) for order in try_ties(task, under, ties)]
        if costs is None:
            return min(found, key=lambda one: one.quality).orders
        made = [
            Schedule(devices, len(placement), microbatches, placement, one.orders, name)
            for one in found
        ]
        return _fastest(made, costs, graph).orders

    return ScheduleFunction(
        build,
        name=name,
        doc=doc,
        placement=placement,
        options={**of_limits, "costs": None, "graph": None},
    )


def fastest(*functions: ScheduleFunction, name: str, doc: str | None = None) -> ScheduleFunction:
    """Make a schedule function that keeps, under given ``costs``, the fastest of several.

    Its options are ``costs`` and ``graph``, handed on to those functions that take them. The
    functions have one placement. Without costs the first function's schedule is taken. Among
    schedules of equal makespan the shorter span wins, then the earlier function.

    >>> from jaxpipe.scheduling import B, F, I, W
    >>> split, whole = greedy(prefer=(I, F, W)), greedy(prefer=(B, F))
    >>> print(fastest(split, whole, name="either")(2, 1, costs=Costs(I=2, W=2, B=2)))
    0F0 0B0
    1F0 1B0
    """
    if not functions:
        raise ScheduleError("fastest() needs at least one schedule function.")

    def build(
        devices: int,
        microbatches: int,
        placement: tuple[int, ...],
        *,
        costs: Costs | None = None,
        graph: Graph | None = None,
    ) -> Orders:
        given = {"costs": costs, "graph": graph}
        tried = functions[:1] if costs is None else functions
        made = [
            each(devices, microbatches, **{k: v for k, v in given.items() if k in each.options})
            for each in tried
        ]
        return _fastest(made, costs, graph).orders

    return ScheduleFunction(
        build,
        name=name,
        doc=doc,
        placement=functions[0].placement,
        options={"costs": None, "graph": None},
    )


def _fastest(made: list[Schedule], costs: Costs | None, graph: Graph | None) -> Schedule:
    if len(made) == 1:
        return made[0]
    runs = [simulate(each, costs, graph=graph) for each in made]
    return min(zip(runs, made, strict=True), key=lambda pair: (pair[0].makespan, pair[0].span))[1]


def _once(costs: Costs | None) -> tuple[Costs, ...]:
    """The costs to order for: the default ones, and before them those given."""
    return tuple(dict.fromkeys((costs_or_default(costs), Costs())))


def _kinds(prefer: Sequence[Kind | str]) -> tuple[str, ...]:
    kinds = tuple(str(kind) for kind in prefer)
    if set(kinds) not in ({"F"}, {"F", "B"}, {"F", "I", "W"}) or len(set(kinds)) != len(kinds):
        raise ScheduleError(
            f"greedy(prefer=({', '.join(kinds)})) must rank F and B, or F, I and W, or F alone, "
            f"each once; kinds are {', '.join(KINDS)}."
        )
    return kinds


def _by_device(
    function: Callable[..., int] | None, devices: int, options: dict[str, Any]
) -> tuple[int, ...] | None:
    """What a user's function of a device gives for each, called with those options it takes."""
    if function is None:
        return None
    takes = parameters_of(function, skip=2)[0]
    given = {option: value for option, value in options.items() if option in takes}
    return tuple(function(device, devices, **given) for device in range(devices))


def _check_limits(
    name: str,
    limits: Sequence[int],
    reserved: Sequence[int] | None,
    chunks: tuple[tuple[int, ...], ...],
) -> None:
    for device, (limit, own) in enumerate(zip(limits, chunks, strict=True)):
        kept = 1 if reserved is None else reserved[device]
        least = 1 + kept * (len(own) - 1)
        if kept < 1:
            raise ScheduleError(
                f"{name}: reserve gives {kept} on device {device}; each later chunk needs at "
                f"least 1 slot."
            )
        if own and limit < least:
            stages = ", ".join(map(str, own))
            raise ScheduleError(
                f"{name}: in_flight allows device {device} to hold {limit} chunks, but its "
                f"{len(own)} chunks (stages {stages}) need at least {least}: one for the first, "
                f"and {kept} for each later one until the backward has freed them."
            )
