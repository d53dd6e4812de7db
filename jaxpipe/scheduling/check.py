"""`check`: the proof that a schedule can be run, or the sentence that says why it cannot.

It goes through complete, placed, in order, free of deadlock, within memory, and stops at the first
fault. A fault in one device's order is shown in the rows around it. What is proved holds for any
speed of devices and links: dependences and device orders together have no cycle, so every way of
running the orders comes to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.dataflow import needs_of, positions, unit_steps
from jaxpipe.scheduling.graph import Graph, graph_or_chain
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.scheduling.text import excerpt
from jaxpipe.scheduling.waits import shortest_cycle

PASS = {
    "F": "the forward",
    "B": "the backward",
    "I": "the backward for inputs",
    "W": "the backward for weights",
}


def check(
    schedule: Schedule,
    graph: Graph | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> None:
    """Raise `ScheduleError` unless ``schedule`` can be run.

    Every (stage, microbatch) has exactly one F and either one B or one I and one W, or the whole
    schedule is forward only; each action stands on its stage's device; no I or B comes before its
    F and no W before its I; the dependences of ``graph`` (a chain if none is given) and the orders
    have no cycle. ``memory_limit``, in the unit of the graph's values (bytes, for a graph made of a
    model), for every device or one for each, is compared with the peak of the instruction lists,
    receive buffers included.

    >>> check(Schedule.parse("0F0 0B0"))
    >>> check(Schedule.parse("0B0 0F0"))
    Traceback (most recent call last):
        ...
    jaxpipe.errors.ScheduleError: Schedule: 0B0 (device 0, position 0) runs before 0F0 (position 1).
      device 0 | 0B0 0F0
                 ^^^
    """
    graph = graph_or_chain(graph, schedule.stages)
    if graph.stages != schedule.stages:
        raise ScheduleError(
            f"{_name(schedule)} has {schedule.stages} stages, but the model was cut into "
            f"{graph.stages}. Cut it into {schedule.stages}, or take a schedule for {graph.stages}."
        )
    fault = next(_faults(schedule, graph), None)
    if fault is not None:
        raise fault
    if memory_limit is not None:
        _check_memory(schedule, graph, memory_limit)


def _faults(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    yield from _misplaced(schedule, graph)
    yield from _repeated(schedule, graph)
    yield from _missing(schedule, graph)
    yield from _before(schedule, graph)
    yield from _deadlocked(schedule, graph)


def _misplaced(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    for device, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            if schedule.placement[action.stage] != device:
                yield _fault(
                    schedule,
                    f"{action} stands on device {device} (position {position}), but the placement "
                    f"puts stage {action.stage} on device {schedule.placement[action.stage]}"
                    f"{_line(graph, action.stage)}. Move the action or change the placement.",
                    {device: position},
                )


def _repeated(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    for device, order in enumerate(schedule.orders):
        seen: dict[Action, int] = {}
        for position, action in enumerate(order):
            if action in seen:
                yield _fault(
                    schedule,
                    f"{action} is repeated on device {device}: at position {seen[action]} and "
                    f"again at position {position}{_line(graph, action.stage)}.",
                    {device: position},
                )
            seen[action] = position
        for action, position in seen.items():
            if action.kind == "B":
                for half in (action._replace(kind="I"), action._replace(kind="W")):
                    if half in seen:
                        yield _fault(
                            schedule,
                            f"{action} (device {device}, position {position}) does what {half} "
                            f"(position {seen[half]}) does: B is I and W in one. Keep either B, or "
                            "I and W.",
                            {device: max(position, seen[half])},
                        )


def _missing(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    present = set(schedule.actions())
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            wanted = ["F"]
            if not schedule.forward_only and Action(stage, "B", microbatch) not in present:
                some = any(Action(stage, kind, microbatch) in present for kind in "IW")
                split = some or schedule.kind_of(stage) == "IW"
                wanted += ["I", "W"] if split else ["B"]
            for kind in wanted:
                missing = Action(stage, kind, microbatch)
                if missing not in present:
                    yield _absent(schedule, graph, missing, present)


def _absent(
    schedule: Schedule, graph: Graph, missing: Action, present: set[Action]
) -> ScheduleError:
    stage, kind, microbatch = missing
    device = schedule.placement[stage]
    order = schedule.orders[device]
    others = [a for a in (missing._replace(kind=k) for k in "FBIW") if a in present]
    there = f" It has {' and '.join(map(str, others))}." if others else ""
    last = order.index(others[-1]) if others else len(order)
    return _fault(
        schedule,
        f"{missing} is missing: device {device} never runs {PASS[kind]} of stage {stage} for "
        f"microbatch {microbatch}{_line(graph, stage)}.{there}",
        {device: last},
    )


def _before(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    first = {"B": "F", "I": "F", "W": "I"}
    where = positions(schedule)
    for action, (device, position) in where.items():
        if action.kind in first:
            earlier = action._replace(kind=first[action.kind])
            if where[earlier][1] > position:
                yield _fault(
                    schedule,
                    f"{action} (device {device}, position {position}) runs before {earlier} "
                    f"(position {where[earlier][1]}){_line(graph, action.stage)}.",
                    {device: position},
                )


def _deadlocked(schedule: Schedule, graph: Graph) -> Iterator[ScheduleError]:
    needs = needs_of(schedule, graph)
    steps = unit_steps(schedule, graph, needs)
    if all(ran == len(order) for ran, order in zip(steps.ran, schedule.orders, strict=True)):
        return
    where = positions(schedule)
    cycle = shortest_cycle(schedule, needs, steps.ran)
    sentences = []
    for (waiter, awaited), (later, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        device, position = where[waiter]
        source, there = where[awaited]
        if device == source:
            value = graph.values[needs[waiter][awaited]]
            sentences.append(
                f"device {device} runs {waiter} (position {position}) before {awaited} (position "
                f"{there}), whose output it reads: {value.name}"
            )
            continue
        sentence = f"device {device} waits to receive {awaited}'s output"
        if awaited == later:
            sentences.append(f"{sentence}, at which device {source} waits itself")
        else:
            after = f"{later} (position {where[later][1]})"
            sentences.append(f"{sentence}, which device {source} runs after {after}")
    marks = {where[waiter][0]: where[waiter][1] for waiter, _ in reversed(cycle)}
    stage = cycle[0][0].stage
    yield _fault(
        schedule, "deadlock: " + ";\n  ".join(sentences) + _line(graph, stage) + ".", marks
    )


def _check_memory(schedule: Schedule, graph: Graph, memory_limit: float | Sequence[float]) -> None:
    from jaxpipe.scheduling.instructions import Accumulate, Free, Run
    from jaxpipe.scheduling.planning import make_plan

    if isinstance(memory_limit, Iterable):
        limits = list(memory_limit)
        if len(limits) != schedule.devices:
            raise ScheduleError(
                f"memory_limit has {len(limits)} entries for {schedule.devices} devices; give one "
                "for each, or one number for all."
            )
    else:
        limits = [memory_limit] * schedule.devices
    planned = make_plan(schedule, graph, "index")
    for device, limit in enumerate(limits):
        peak = planned.peaks[device]
        if peak <= limit:
            continue
        over = next(i for i, live in enumerate(planned.live[device]) if live > limit)
        done = [i.action for i in planned.lists[device][: over + 1] if isinstance(i, Run)]
        held = planned.live[device][over]
        at = planned.lists[device][over]
        assert not isinstance(at, Accumulate | Free)  # these only ever give back
        if isinstance(at, Run):
            moment = f"at {at.action}"
        else:
            value = graph.values[at.value].name
            after = f"after {done[-1]}" if done else "before its first action"
            moment = f"on receiving {value} of microbatch {at.microbatch}, {after}"
        position = schedule.orders[device].index(done[-1]) if done else 0
        stage = done[-1].stage if done else schedule.chunks(device)[0]
        raise _fault(
            schedule,
            f"device {device} holds {held:,} {moment} (position {position}), over its limit of "
            f"{limit:,}, and {peak:,} at its peak{_line(graph, stage)}. Raise the limit, or take a "
            "schedule that keeps fewer microbatches in flight there.",
            {device: position},
        )


def _fault(schedule: Schedule, message: str, marks: dict[int, int]) -> ScheduleError:
    return ScheduleError(f"{_name(schedule)}: {message}\n{excerpt(schedule, marks)}")


def _name(schedule: Schedule) -> str:
    return f"Schedule {schedule.name}".rstrip()


def _line(graph: Graph, stage: int) -> str:
    return f" (stage {stage} is {graph.lines[stage]})" if stage < len(graph.lines) else ""
