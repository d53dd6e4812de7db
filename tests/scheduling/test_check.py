"""`check` refuses exactly what cannot run, and says why in words that help."""

import re
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Action, Graph, Schedule, Value, check, plan
from jaxpipe.scheduling.dataflow import needs_of, unit_steps
from jaxpipe.scheduling.waits import shortest_cycle

from .random_schedules import graphs, needs, shuffled_schedules, valid_schedules


def refusal(schedule, *args, **kwargs):
    with pytest.raises(ScheduleError) as error:
        check(schedule, *args, **kwargs)
    return str(error.value)


def some_interleaving_finishes(schedule, graph):
    """Search of all interleavings of the devices' orders, by the meaning of the graph alone."""
    before = {}
    for producer, reader in needs(graph, set(schedule.actions())):
        before.setdefault(reader, set()).add(producer)
    seen, todo = set(), [(0,) * schedule.devices]
    end = tuple(map(len, schedule.orders))
    while todo:
        at = todo.pop()
        if at == end:
            return True
        if at in seen:
            continue
        seen.add(at)
        done = {a for order, n in zip(schedule.orders, at, strict=True) for a in order[:n]}
        for device, order in enumerate(schedule.orders):
            if at[device] < len(order) and before.get(order[at[device]], set()) <= done:
                todo.append(tuple(n + (d == device) for d, n in enumerate(at)))
    return False


@st.composite
def cases(draw, of=shuffled_schedules):
    graph = draw(graphs(max_stages=3))
    return graph, draw(of(graph, max_devices=3, max_microbatches=2))


@given(cases())
@settings(max_examples=200, deadline=None)
def test_check_passes_exactly_what_some_interleaving_finishes(case):
    graph, schedule = case
    if some_interleaving_finishes(schedule, graph):
        check(schedule, graph)
    else:
        refusal(schedule, graph)


@given(cases(of=valid_schedules), st.data())
@settings(max_examples=100, deadline=None)
def test_check_refuses_a_schedule_that_lost_or_doubled_an_action(case, data):
    graph, schedule = case
    device = data.draw(st.sampled_from([d for d, o in enumerate(schedule.orders) if o]))
    order = list(schedule.orders[device])
    position = data.draw(st.integers(0, len(order) - 1))
    action = order[position]
    if data.draw(st.booleans()):
        del order[position]
        kinds = "F" if action.kind == "F" else "[BIW]"  # where all is gone: as the stage does it
        word = f"{action.stage}{kinds}{action.microbatch} is missing"
    else:
        order.insert(data.draw(st.integers(0, len(order))), action)
        word = f"{action} is repeated"
    orders = [order if d == device else o for d, o in enumerate(schedule.orders)]
    sizes = (schedule.devices, schedule.stages, schedule.microbatches, schedule.placement)
    if not any(orders):
        word = "is missing"
    if all(a.kind == "F" for o in orders for a in o):
        return  # the lost action was the only backward: forward only is legal
    assert re.search(word, refusal(Schedule(*sizes, orders), graph))


def brute_shortest(schedule, needed, ran):
    """Length of the shortest cycle of waits by breadth-first search from every wait."""
    where = {a: (d, p) for d, order in enumerate(schedule.orders) for p, a in enumerate(order)}
    waits = [
        (a, c)
        for a in where
        for c in needed[a]
        if where[a][1] >= ran[where[a][0]] and where[c][1] >= ran[where[c][0]]
    ]

    def leads(wait, other):
        return where[other[0]][0] == where[wait[1]][0] and where[other[0]][1] <= where[wait[1]][1]

    best = None
    for first in waits:
        distance, todo = {first: 1}, deque([first])
        while todo:
            wait = todo.popleft()
            if leads(wait, first):
                best = min(best or 10**9, distance[wait])
                break
            for other in waits:
                if other not in distance and leads(wait, other):
                    distance[other] = distance[wait] + 1
                    todo.append(other)
    return best


@given(cases())
@settings(max_examples=200, deadline=None)
def test_the_cycle_named_is_the_shortest(case):
    graph, schedule = case
    needed = needs_of(schedule, graph)
    ran = unit_steps(schedule, graph, needed).ran
    if ran == tuple(map(len, schedule.orders)):
        return
    cycle = shortest_cycle(schedule, needed, ran)
    where = {a: (d, p) for d, order in enumerate(schedule.orders) for p, a in enumerate(order)}
    for (waiter, awaited), (later, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        assert awaited in needed[waiter]
        assert where[awaited][0] == where[later][0]
        assert where[awaited][1] >= where[later][1]
    assert len(cycle) == brute_shortest(schedule, needed, ran)


@given(cases(of=valid_schedules))
@settings(max_examples=100, deadline=None)
def test_memory_limit_is_sharp(case):
    graph, schedule = case
    peaks = plan(schedule, graph).peaks
    check(schedule, graph, memory_limit=peaks)
    check(schedule, graph, memory_limit=max(peaks))
    for device, peak in enumerate(peaks):
        if peak:
            limits = [p - (d == device) for d, p in enumerate(peaks)]
            message = refusal(schedule, graph, memory_limit=limits)
            assert f"device {device} holds {peak}" in message
            assert f"limit of {peak - 1}" in message


def test_a_deadlock_is_told_as_a_chain_of_waits():
    message = refusal(Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", name="mine"))
    assert message == (
        "Schedule mine: deadlock: device 0 waits to receive 1B0's output, which device 1 runs "
        "after 1F1 (position 0);\n"
        "  device 1 waits to receive 0F1's output, which device 0 runs after 0B0 (position 1).\n"
        "  device 0 | 0F0 0B0 0F1 0B1\n"
        "                 ^^^\n"
        "  device 1 | 1F1 1B1 1F0 1B0\n"
        "             ^^^"
    )


def test_stages_of_one_device_in_the_wrong_order_are_told():
    message = refusal(Schedule.parse("0F0 3F0 3B0 0B0\n2F0 1F0 2B0 1B0"))
    assert (
        "device 1 runs 2F0 (position 0) before 1F0 (position 1), whose output it reads" in message
    )


def test_the_graph_decides_what_waits():
    """Two towers without an edge may run in an order that a chain forbids."""
    schedule = Schedule.parse("1F0 0F0 0B0 1B0", placement=(0, 0))
    check(schedule, Graph(2, (), ()))
    assert "device 0 runs 1F0 (position 0) before 0F0" in refusal(schedule)
    skip = (
        Value("a", 1, (0, "F"), ((2, "F"),)),
        Value("b", 1, (2, "I"), ((0, "I"), (0, "W"))),
    )
    message = refusal(Schedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0"), Graph(3, skip), 0)
    assert "device 0 holds 1 at 0F0" in message
    late = Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1")
    message = refusal(late, Graph(3, skip))
    assert "device 0 waits to receive 2B0's output, which device 2 runs after 2F1" in message
    assert "device 2 waits to receive 0F1's output, which device 0 runs after 0B0" in message
    assert "device 1 waits" not in message


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0 0F0 0B0", "0F0 is repeated on device 0: at position 0 and again at position 1"),
        ("0F0 0B0 0B0", "0B0 is repeated on device 0"),
        (
            "0F0 0F1 0B0",
            "device 0 never runs the backward of stage 0 for microbatch 1. It has 0F1.",
        ),
        ("0B0 0F1 0B1", "0F0 is missing"),
        ("0F0 0W0", "0I0 is missing"),
        ("0F0 0I0", "0W0 is missing"),
        ("0F0 0I0 0B0", "0B0 (device 0, position 2) does what 0I0 (position 1) does"),
        ("0F0 0B0 0F1", "0B1 is missing"),
        ("0F0\n1F0 1B0", "0B0 is missing: device 0 never runs"),
        ("0B0 0F0", "0B0 (device 0, position 0) runs before 0F0 (position 1)"),
        ("0F0 0W0 0I0", "0W0 (device 0, position 1) runs before 0I0 (position 2)"),
        ("0I0 0F0 0W0", "0I0 (device 0, position 0) runs before 0F0 (position 1)"),
    ],
)
def test_the_fault_is_named(text, words):
    assert words in refusal(Schedule.parse(text))


def test_a_misplaced_action_is_named_with_both_devices():
    """A V-shaped schedule with loop placement."""
    text = "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"
    check(Schedule.parse(text))
    message = refusal(Schedule.parse(text, placement=(0, 1, 0, 1)))
    assert (
        "3F0 stands on device 0 (position 1), but the placement puts stage 3 on device 1" in message
    )
    assert "  device 0 | 0F0 3F0 3B0 0B0\n                 ^^^" in message


def test_forward_only_is_legal_and_must_be_complete():
    check(Schedule.parse("0F0 0F1\n1F0 1F1"))
    assert "1F1 is missing" in refusal(Schedule.parse("0F0 0F1\n1F0"))


def test_a_missing_action_of_a_vast_schedule_is_found_at_once():
    assert "0F1 is missing" in refusal(Schedule.parse("0F0 0B0 0F99999999 0B99999999"))


def test_the_graph_has_the_schedules_stages():
    message = refusal(Schedule.parse("0F0 0B0"), Graph.chain(3))
    assert "has 1 stages, but the model was cut into 3" in message


def test_source_lines_are_shown():
    graph = Graph.chain(2)
    graph = Graph(2, graph.values, graph.gradient_nbytes, lines=("m.py:3", "m.py:9"))
    assert "(stage 1 is m.py:9)" in refusal(Schedule.parse("0F0 0B0\n1F0"), graph)
    message = refusal(Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"), graph)
    assert "(stage 0 is m.py:3)" in message


def test_the_action_that_first_exceeds_memory_is_named():
    schedule = Schedule.parse("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", name="all forwards")
    message = refusal(schedule, memory_limit=2)
    assert "device 0 holds 3 at 0F2 (position 2), over its limit of 2, and 4 at its peak" in message
    assert "memory_limit has 2 entries for 1 devices" in refusal(schedule, memory_limit=(1, 2))
    graph = Graph.chain(2, activation=1, edge=5)
    message = refusal(Schedule.parse("0F0 0B0\n1F0 1B0"), graph, memory_limit=(9, 4))
    assert "on receiving output of stage 0 of microbatch 0, before its first action" in message


def test_long_rows_are_cut_around_the_mark():
    order = [Action(0, "F", i) for i in range(40)] + [Action(0, "B", i) for i in range(39)]
    message = refusal(Schedule(1, 1, 40, (0,), (order,)))
    assert "0B39 is missing" in message
    assert "… 0F34 0F35 0F36 0F37 0F38 0F39 0B0" in message
    rows = message.splitlines()[-2:]
    assert rows[0][rows[1].index("^") :].startswith("0F39")
