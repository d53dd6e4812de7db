"""`greedy` orders by preference within its limits, never gets stuck, and says why it cannot."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import (
    B,
    Costs,
    F,
    Graph,
    I,
    Value,
    W,
    fastest,
    greedy,
    placements,
    schedule,
    simulate,
)

FEW = settings(max_examples=60, deadline=None)
tenths = st.integers(0, 30).map(lambda n: n / 10)


@st.composite
def costs(draw, stages):
    def each():
        return draw(st.lists(tenths, min_size=stages, max_size=stages))

    rate = draw(st.none() | st.sampled_from([0.3, 1.0, 4.0]))
    return Costs(F=each(), I=each(), W=each(), latency=draw(tenths), bandwidth=rate, nbytes=1)


@st.composite
def cases(draw):
    """A placement with one, two or four chunks per device, limits from the least on, and costs."""
    devices = draw(st.integers(1, 4))
    placement = draw(
        st.sampled_from(
            [
                placements.linear(devices),
                placements.loop(devices),
                placements.vee(devices),
                placements.wave(devices, w=2),
            ]
        )
    )
    chunks = len(placement) // devices
    reserve = draw(st.integers(1, 2))
    limits = [draw(st.integers(1 + reserve * (chunks - 1), 8)) for _ in range(devices)]
    return devices, placement, reserve, limits, draw(costs(len(placement)))


def most_in_flight(order):
    held, most = 0, 0
    for action in order:
        held += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, held)
    return most


@given(cases(), st.integers(1, 6), st.permutations("FIW") | st.permutations("FB"), st.data())
@FEW
def test_no_limit_is_passed_and_nothing_gets_stuck(case, microbatches, prefer, data):
    devices, placement, reserve, limits, some = case
    tie = data.draw(st.sampled_from(["turns", "alternate", "oldest", "deepest"]))
    make = greedy(
        prefer=prefer,
        in_flight=lambda device, devices: limits[device],
        reserve=lambda device, devices: reserve,
        placement=placement,
        ties=[tie],
    )
    made = make(devices, microbatches, costs=some)  # is checked when it is made
    for device, order in enumerate(made.orders):
        assert most_in_flight(order) <= limits[device]


@given(cases(), st.integers(1, 5))
@FEW
def test_under_given_costs_it_is_never_slower_than_without(case, microbatches):
    devices, placement, _, limits, some = case
    limits = [max(limit, 4) for limit in limits]
    make = greedy(
        prefer=(I, F, W), in_flight=lambda device, devices: limits[device], placement=placement
    )
    ordered, plain = make(devices, microbatches, costs=some), make(devices, microbatches)
    assert simulate(ordered, some).makespan <= simulate(plain, some).makespan


@given(costs(3), st.integers(1, 5))
@FEW
def test_a_device_never_waits_while_something_could_run(some, microbatches):
    """Without limits: an action starts when its device ends the one before, or its input comes."""
    made = greedy(prefer=(B, F), ties=["oldest"])(3, microbatches, costs=some)
    timeline = simulate(made, some)
    arrivals = {(t.to, t.microbatch, t.end) for t in timeline.transfers}
    for device, order in enumerate(made.orders):
        previous = 0.0
        for action in order:
            start = timeline.start[action]
            came = any(
                to == device and m == action.microbatch and end == start for to, m, end in arrivals
            )
            assert start == previous or came
            previous = timeline.end[action]


def test_backward_first_within_1f1bs_limits_is_1f1b():
    lazy = greedy(prefer=(B, F), in_flight=lambda device, devices: devices - device)
    for P in range(1, 7):
        for M in (1, P, 2 * P + 1):
            assert lazy(P, M) == schedules.one_f_one_b(P, M)


def test_forwards_first_without_a_limit_is_gpipe():
    for P, M in ((1, 3), (3, 5), (4, 2)):
        assert greedy(prefer=(F, B))(P, M) == schedules.gpipe(P, M)


def test_forward_only_needs_no_limits():
    made = greedy(prefer=(F,), in_flight=lambda device, devices: 1)(2, 3)
    assert str(made) == "0F0 0F1 0F2\n1F0 1F1 1F2"


def test_options_of_limits_and_placement_are_options_of_the_schedule():
    make = greedy(
        prefer=(B, F),
        in_flight=lambda device, devices, extra=0: 2 * devices + extra,
        placement=placements.loop,
        name="mine",
    )
    assert make.stages(3, chunks=4) == 12
    assert make.__name__ == "mine"
    made = make(2, 4, extra=3, chunks=2)
    assert made.name == "mine(extra=3, chunks=2)"
    assert most_in_flight(made.orders[0]) > most_in_flight(make(2, 4).orders[0])
    with pytest.raises(ScheduleError, match=r"no option extras; did you mean extra\?"):
        make(2, 4, extras=1)


def test_dependences_of_a_graph_are_kept():
    skip = Value("skip", 1, (0, "F"), ((2, "F"),))
    back = Value("cotangent of the skip", 1, (2, "I"), ((0, "I"), (0, "W")))
    graph = Graph(3, (skip, back))
    made = greedy(prefer=(I, F, W))(3, 4, graph=graph, costs=Costs(F=(5, 1, 1), latency=1))
    made.check(graph)


def test_fastest_keeps_the_fastest_under_given_costs_and_else_the_first():
    @schedule
    def late(device, devices, microbatches):
        yield from map(F, range(microbatches))
        yield from map(I, range(microbatches))
        yield from map(W, range(microbatches))

    both = fastest(late, greedy(prefer=(I, F, W)), name="both")
    other = Costs(F=1, I=2, W=3)
    assert both(3, 4) == late(3, 4)
    assert simulate(both(3, 4, costs=other), other).makespan <= min(
        simulate(late(3, 4), other).makespan,
        simulate(greedy(prefer=(I, F, W))(3, 4, costs=other), other).makespan,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefer": (F, I)}, r"prefer=\(F, I\)\) must rank F and B, or F, I and W, or F alone"),
        ({"prefer": (F, B, B)}, "each once"),
        ({"prefer": ("X",)}, "kinds are F, B, I, W"),
        ({"prefer": (F, B), "ties": ()}, "leaves nothing to try"),
        (
            {"prefer": (F, B), "ties": ("newest",)},
            "knows turns, alternate, oldest, deepest, not 'newest'",
        ),
        ({"prefer": (F, B), "reserve": lambda device, devices: 1}, "in_flight= gives"),
    ],
)
def test_a_preference_that_is_none_is_refused(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        greedy(**arguments)


def test_a_limit_too_low_for_one_microbatch_names_the_device_and_its_stages():
    make = greedy(prefer=(B, F), in_flight=lambda device, devices: 1, placement=placements.vee)
    with pytest.raises(
        ScheduleError, match=r"device 0 to hold 1 chunks.*stages 0, 5\) need at least 2"
    ):
        make(3, 2)
    make = greedy(
        prefer=(B, F),
        in_flight=lambda device, devices: 2,
        reserve=lambda device, devices: 0,
        placement=placements.vee,
    )
    with pytest.raises(ScheduleError, match="reserve gives 0 on device 0"):
        make(3, 2)


def test_a_graph_that_goes_in_circles_is_told_with_what_each_device_holds():
    there = Value("there", 1, (0, "F"), ((1, "F"),))
    back = Value("back", 1, (1, "F"), ((0, "F"),))
    with pytest.raises(ScheduleError, match=r"stuck: device 0 .*still has to run 0F0"):
        greedy(prefer=(B, F), in_flight=lambda device, devices: 2)(
            2, 1, graph=Graph(2, (there, back))
        )
