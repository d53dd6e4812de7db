"""`simulate` gives the times that dependences, orders and transfers imply, and no others."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Costs, Graph, Schedule, Timeline, check, plan, simulate

from .random_schedules import (
    any_schedules,
    graphs,
    maker,
    needs,
    shuffled_schedules,
    valid_schedules,
)

FEW = settings(max_examples=80, deadline=None)
whole = st.integers(0, 6)


@st.composite
def cases(draw, of=valid_schedules):
    graph = draw(graphs())
    return graph, draw(of(graph))


@st.composite
def costs(draw, stages=4):
    """Whole times for each stage, so that sums are exact."""
    each = st.lists(whole, min_size=stages, max_size=stages)
    whole_backward = draw(st.none() | each)
    times = {kind: draw(each) for kind in "FIW"}
    return Costs(
        **times,
        B=whole_backward,
        latency=draw(whole),
        bandwidth=draw(st.none() | st.sampled_from([0.25, 0.5, 1.0])),
    )


def fitting(graph, some):
    """The same costs, for as many stages as the graph has."""
    cut = {k: getattr(some, k)[: graph.stages] for k in "FIWB" if getattr(some, k) is not None}
    return replace(some, **cut)


def time_of(action, graph, some):
    """An action's time, restated."""
    s = action.stage
    parts = {k: 0.0 if (s, k) in graph.empty else getattr(some, k)[s] for k in "FIW"}
    if action.kind != "B":
        return parts[action.kind]
    if some.B is None:
        return parts["I"] + parts["W"]
    return 0.0 if {(s, "I"), (s, "W")} <= graph.empty else some.B[s]


def earliest(schedule, graph, some):
    """Ends of all actions by repeated relaxation; a latency where devices differ, no bandwidth."""
    actions = set(schedule.actions())
    before = {action: [] for action in actions}
    for producer, reader in needs(graph, actions):
        before[reader].append((producer, 0.0))
    for value in graph.values:
        for m in range(schedule.microbatches):
            producer = maker(value.producer, m, actions)
            for of in value.readers:
                reader = maker(of, m, actions)
                if producer and reader and of not in graph.empty:
                    apart = schedule.placement[producer.stage] != schedule.placement[reader.stage]
                    before[reader].append((producer, some.latency if apart else 0.0))
    for order in schedule.orders:
        for first, second in pairwise(order):
            before[second].append((first, 0.0))
    end = dict.fromkeys(actions, 0.0)
    changed = True
    while changed:
        changed = False
        for action in actions:
            ready = max((end[b] + wait for b, wait in before[action] if b != action), default=0.0)
            if ready + time_of(action, graph, some) != end[action]:
                end[action] = ready + time_of(action, graph, some)
                changed = True
    return end


@given(cases(), costs())
@FEW
def test_each_action_ends_when_its_longest_chain_of_waits_ends(case, some):
    graph, schedule = case
    some = replace(fitting(graph, some), bandwidth=None)
    assert simulate(schedule, some, graph=graph).end == earliest(schedule, graph, some)


@given(cases(shuffled_schedules))
@FEW
def test_simulate_refuses_exactly_what_check_refuses(case):
    graph, schedule = case
    try:
        check(schedule, graph)
    except ScheduleError as error:
        with pytest.raises(ScheduleError) as refused:
            simulate(schedule, graph=graph)
        assert str(refused.value) == str(error)
    else:
        assert isinstance(simulate(schedule, graph=graph), Timeline)


@given(any_schedules())
@FEW
def test_simulate_refuses_incomplete_and_misplaced_schedules_as_check_does(schedule):
    try:
        check(schedule)
    except ScheduleError:
        with pytest.raises(ScheduleError):
            simulate(schedule)
    else:
        simulate(schedule)


@given(cases(), costs())
@FEW
def test_devices_do_one_thing_at_a_time_and_links_move_values_in_order(case, some):
    graph, schedule = case
    timeline = simulate(schedule, fitting(graph, some), graph=graph)
    for begun, ended in zip(timeline.starts, timeline.ends, strict=True):
        assert all(end <= start for end, start in zip(ended, begun[1:], strict=False))
    links = {}
    for transfer in timeline.transfers:
        links.setdefault((transfer.source, transfer.to), []).append(transfer)
    for queue in links.values():
        for first, second in pairwise(queue):
            busy = (
                0 if some.bandwidth is None else graph.values[first.value].nbytes / some.bandwidth
            )
            assert first.start + busy <= second.start
            assert first.end <= second.end or some.bandwidth is not None


@given(cases(), costs())
@FEW
def test_makespan_is_at_least_each_devices_work_and_each_chain_of_needs(case, some):
    graph, schedule = case
    some = fitting(graph, some)
    timeline = simulate(schedule, some, graph=graph)
    for order, busy in zip(schedule.orders, timeline.busy, strict=True):
        assert busy == sum(time_of(action, graph, some) for action in order)
        assert busy <= timeline.span
    assert timeline.span <= timeline.makespan
    free = dict.fromkeys(schedule.actions(), 0.0)
    pairs = sorted(needs(graph, set(free)))
    for _ in range(len(free)):  # the longest chain of needs, whatever the orders
        for producer, reader in pairs:
            ready = free[producer] + time_of(producer, graph, some)
            free[reader] = max(free[reader], ready)
    longest = max(start + time_of(a, graph, some) for a, start in free.items())
    assert min(timeline.start.values()) == 0
    assert longest <= timeline.makespan


@given(cases(), costs(), st.sampled_from([0.25, 2.0, 1024.0]), st.booleans())
@FEW
def test_scaling_all_costs_scales_all_times(case, some, factor, overlap):
    graph, schedule = case
    some = replace(fitting(graph, some), overlap=overlap)
    base = simulate(schedule, some, graph=graph)
    scaled = simulate(schedule, some.scaled(factor), graph=graph)
    assert scaled.makespan == base.makespan * factor
    assert scaled.span == base.span * factor
    assert scaled.end == {action: end * factor for action, end in base.end.items()}


@given(cases(), costs(), st.integers(0, 3), st.sampled_from([1, 2, 4]), st.booleans())
@FEW
def test_slower_transfers_never_make_a_fixed_order_faster(case, some, latency, slower, overlap):
    graph, schedule = case
    some = replace(fitting(graph, some), overlap=overlap)
    rate = None if some.bandwidth is None else some.bandwidth / slower
    slow = replace(some, latency=some.latency + latency, bandwidth=rate)
    base = simulate(schedule, some, graph=graph).end
    for action, end in simulate(schedule, slow, graph=graph).end.items():
        assert end >= base[action]


@given(cases(), costs())
@FEW
def test_transfers_that_hold_both_devices_are_never_faster(case, some):
    graph, schedule = case
    some = fitting(graph, some)
    beside = simulate(schedule, replace(some, bandwidth=None), graph=graph)
    held = simulate(schedule, replace(some, bandwidth=None, overlap=False), graph=graph)
    assert held.makespan >= beside.makespan
    assert all(held.end[action] >= end for action, end in beside.end.items())


@given(cases(), costs())
@FEW
def test_each_action_of_the_critical_path_waits_for_the_one_before(case, some):
    graph, schedule = case
    timeline = simulate(schedule, fitting(graph, some), graph=graph)
    path = timeline.critical_path
    assert timeline.start[path[0]] == 0
    assert timeline.end[path[-1]] == max(timeline.end.values())
    arrivals = {}
    for t in timeline.transfers:
        arrivals.setdefault((t.microbatch, t.source, t.to), set()).add(t.end)
    for first, second in pairwise(path):
        source, to = schedule.placement[first.stage], schedule.placement[second.stage]
        starts = arrivals.get((first.microbatch, source, to), set()) | {timeline.end[first]}
        assert timeline.start[second] in starts


@given(cases())
@FEW
def test_peak_is_the_plans_and_the_curves_highest_point(case):
    graph, schedule = case
    timeline = simulate(schedule, graph=graph)
    assert timeline.peak == plan(schedule, graph).peaks
    highest = tuple(max(held for _, held in curve) for curve in timeline.held)
    assert highest == timeline.peak
    for curve in timeline.held:
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_no_jitter_is_jitter_zero_and_jitter_repeats_by_seed():
    made = schedules.zb_h1(4, 8)
    plain = simulate(made, Costs())
    assert simulate(made, Costs(jitter=0.0, seed=7)).ends == plain.ends
    once, again, other = (simulate(made, Costs(jitter=0.3, seed=n)).ends for n in (1, 1, 2))
    assert once == again != other


def test_jitter_is_the_actions_own_whatever_the_schedule_and_has_mean_one():
    some = Costs(jitter=0.5, seed=3)
    ran = [simulate(schedules.get(name)(2, 300), some) for name in ("gpipe", "1f1b")]
    lengths = [{a: r.end[a] - r.start[a] for a in r.end} for r in ran]
    assert lengths[0].keys() == lengths[1].keys()
    assert all(math.isclose(lengths[0][a], lengths[1][a]) for a in lengths[0])
    forwards = [length for action, length in lengths[0].items() if action.kind == "F"]
    assert abs(sum(forwards) / len(forwards) - 1) < 0.1


def test_a_link_moves_one_value_after_the_other_and_latencies_overlap():
    made = Schedule.parse("0F0 0F1 0F2\n1F0 1F1 1F2")
    graph = Graph.chain(2, edge=30)
    timeline = simulate(made, Costs(latency=5, bandwidth=10), graph=graph)
    assert [(t.start, t.end) for t in timeline.transfers] == [(1, 9), (4, 12), (7, 15)]
    assert timeline.starts[1] == (9, 12, 15)


def test_sizes_and_links_can_be_given_one_by_one():
    made = Schedule.parse("0F0\n1F0\n2F0")
    some = Costs(
        latency={(0, 1): 1, (1, 2): 2},
        bandwidth={(0, 1): 1, (1, 2): 10},
        nbytes={(0, 1): 3, (1, 2): 20},
    )
    timeline = simulate(made, some)
    assert timeline.starts == ((0,), (1 + 3 + 1,), (6 + 2 + 2,))


def test_a_transfer_without_overlap_holds_sender_and_receiver():
    """Device 0 cannot go on before device 1, busy with 1F0, takes 0F1's output."""
    made = Schedule.parse("0F0 0F1\n1F0 1F1")
    timeline = simulate(made, Costs(latency=2, overlap=False))
    assert timeline.starts == ((0, 3), (3, 6))
    assert timeline.transfers[1][-2:] == (4, 6)
    assert simulate(made, Costs(latency=2)).starts == ((0, 1), (3, 4))


def test_empty_passes_take_no_time_and_a_backward_is_what_is_left():
    graph = replace(Graph.chain(2), empty=frozenset({(0, "I")}))
    split = simulate(Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0"), Costs(), graph=graph)
    whole_backward = simulate(Schedule.parse("0F0 0B0\n1F0 1B0"), Costs(), graph=graph)
    assert split.ends[0] == (1, 3, 4)
    assert whole_backward.ends[0] == (1, 5)


def test_a_number_is_a_devices_time_shared_by_its_chunks():
    for chunks in (1, 2, 4):
        timeline = schedules.interleaved(2, 4, chunks=chunks).simulate(Costs(F=2, I=3, W=3))
        assert timeline.busy == (32, 32)


def test_bubble_is_the_idle_share_of_the_makespan():
    timeline = schedules.one_f_one_b(4, 8).simulate()
    assert timeline.bubble == (1 - 24 / 33,) * 4
    assert timeline.idle == pytest.approx(1 - 24 / 33)
    assert repr(timeline) == (
        "Timeline(1f1b, 4 devices, 8 microbatches: makespan 33, span 33, bubble 27.3 %, "
        "peak 4 3 2 1)"
    )
    assert len(str(timeline).splitlines()) == 6


def test_an_idle_device_is_legal():
    timeline = simulate(Schedule.parse("0F0 0B0\n-"))  # which has no share of the work
    assert timeline.spans == (3, 0) and timeline.bubble == (0, 1)
    assert "peak 1 0" in repr(timeline)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"F": -1}, r"Costs\(F=...\) contains -1.0"),
        ({"W": float("nan")}, r"Costs\(W=...\) contains nan"),
        ({"I": "fast"}, r"Costs\(I=...\) must be made of numbers, got 'fast'"),
        ({"B": (1, None)}, r"Costs\(B=...\) must be made of numbers, got None"),
        ({"bandwidth": 0}, "nothing would ever arrive"),
        ({"latency": {(0, 1): -2}}, r"Costs\(latency=...\) contains -2.0"),
        ({"latency": {0: 2}}, r"a mapping from pairs to numbers"),
        ({"jitter": -0.1}, r"Costs\(jitter=...\)"),
    ],
)
def test_costs_refuse_what_is_no_cost(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        Costs(**arguments)


def test_costs_that_do_not_fit_name_both_numbers():
    made = schedules.gpipe(2, 2)
    with pytest.raises(ScheduleError, match="has 3 entries but the schedule has 2 stages"):
        simulate(made, Costs(F=(1, 2, 3)))
    with pytest.raises(ScheduleError, match="no entry for devices 1 -> 0"):
        simulate(made, Costs(latency={(0, 1): 1}))
    with pytest.raises(ScheduleError, match="The graph has 3 stages but the schedule has 2"):
        simulate(made, graph=Graph.chain(3))
    with pytest.raises(ScheduleError, match=r"dispatch='ready'.*only dispatch='fixed'"):
        simulate(made, dispatch="ready")


@pytest.mark.slow
def test_half_a_million_results_take_under_a_second():
    import time

    made = schedules.interleaved(16, 512)
    begin = time.perf_counter()
    simulate(made)
    assert time.perf_counter() - begin < 1
