"""Every schedule of the library is complete for all sizes and reaches its closed form."""

import doctest

import pytest

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Costs, Graph, Schedule, simulate

SIZES = [(P, M) for P in range(1, 9) for M in sorted({1, 2, 3, P, P + 1, 2 * P, 2 * P + 1, 17})]
ENOUGH = [(P, M) for P, M in SIZES if M >= P]
FEW_SIZES = [(1, 1), (1, 3), (2, 1), (3, 2), (4, 8), (5, 7), (8, 3)]


def each_size(name, sizes=SIZES, **options):
    for P, M in sizes:
        yield P, M, schedules.get(name)(P, M, **options)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_is_complete_for_every_size(name):
    for P, M, made in each_size(name):
        made.check()
        actions = list(made.actions())
        assert len(actions) == len(set(actions))
        kinds = "FB" if any(a.kind == "B" for a in actions) else "FIW"
        expected = {(s, k, m) for s in range(made.stages) for k in kinds for m in range(M)}
        assert set(actions) == expected
        assert (made.devices, made.microbatches) == (P, M)
        assert made.stages == schedules.get(name).stages(P)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_passes_the_check_for_every_count_from_one_to_past_two_per_device(name):
    for P in range(1, 6):
        for M in range(1, 2 * P + 2):
            schedules.get(name)(P, M).check()


@pytest.mark.parametrize("name", schedules.names())
def test_with_fewer_microbatches_than_devices_nothing_beats_one_microbatchs_way(name):
    for P, M, made in each_size(name):
        if M < P:
            assert made.simulate().makespan >= P * (1 + 1) + P / made.stages  # P(F + I) and one W


@pytest.mark.parametrize("F", [1, 2])
@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_take_the_bubble_of_every_other_device(name, F, B):
    for P, M, made in each_size(name):
        timeline = made.simulate(Costs(F=F, B=B))
        assert timeline.makespan == timeline.span == (M + P - 1) * (F + B)


def test_gpipe_holds_every_microbatch():
    for P, M, made in each_size("gpipe"):
        assert made.simulate().peak == (M,) * P


def test_1f1b_holds_as_many_as_there_are_devices_from_here_on():
    for P, M, made in each_size("1f1b"):
        assert made.simulate().peak == tuple(min(M, P - d) for d in range(P))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_divides_the_bubble_by_its_chunks(chunks):
    rounds = [(P, n * P) for P in range(1, 9) for n in (1, 2, 3)]
    for P, M, made in each_size("interleaved", rounds, chunks=chunks):
        timeline = made.simulate(Costs(F=1, B=2))
        form = M * 3 + (P - 1) * 3 / chunks
        assert timeline.makespan == pytest.approx(form, rel=1e-12)
        assert timeline.span == pytest.approx(form, rel=1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_holds_what_its_warm_up_lets_in(chunks):
    for P, M, made in each_size("interleaved", chunks=chunks):
        peak = made.simulate().peak
        for d in range(P):
            form = min(M * chunks, (chunks - 1) * P + 2 * (P - 1 - d) + 1)
            assert peak[d] == form if M % P == 0 else peak[d] <= form


def test_interleaved_of_other_counts_is_the_next_round_without_what_is_too_much():
    for P, M, made in each_size("interleaved"):
        full = schedules.interleaved(P, -(-M // P) * P)
        orders = [[a for a in order if a.microbatch < M] for order in full.orders]
        assert made == Schedule(P, 2 * P, M, made.placement, orders)


def test_zb_h1_fills_the_bubble_within_the_memory_of_1f1b():
    for P, M, made in each_size("zb_h1", ENOUGH):
        timeline = made.simulate()
        assert timeline.makespan == timeline.span == 3 * M + (P - 1)
        assert timeline.peak == (P,) * P
        assert max(timeline.peak) == max(schedules.one_f_one_b(P, M).simulate().peak)


def test_zb_h1_runs_each_weights_pass_as_many_microbatches_late_as_its_device():
    for _, M, made in each_size("zb_h1", ENOUGH):
        for d, order in enumerate(made.orders):
            place = {(a.kind, a.microbatch): n for n, a in enumerate(order)}
            for k in range(d, M):
                assert place["W", k - d] == place["I", k] + 1


def test_zb_v_leaves_half_a_forward_of_bubble_per_device():
    by_second_rule = [(5, 8), (6, 9), (7, 10), (8, 11), (8, 14)]
    for P, M, made in each_size("zb_v", ENOUGH + by_second_rule):
        timeline = made.simulate()
        assert timeline.makespan == 3 * M + (P - 1) / 2
        assert max(timeline.peak) <= 2 * P


@pytest.mark.slow
def test_zb_v_reaches_its_form_for_many_sizes():
    sizes = [(P, M) for P in range(1, 17) for M in range(P, 3 * P + 2)]
    for P, M, made in each_size("zb_v", sizes):
        above = made.simulate().makespan - (3 * M + (P - 1) / 2)
        assert above == 0 if P <= 8 else above <= 0.5


@pytest.mark.parametrize(("name", "most"), [("zb_h1", 1), ("zb_v", 2)])
def test_zero_bubble_schedules_hold_no_more_with_few_microbatches(name, most):
    for P, M, made in each_size(name):
        assert max(made.simulate().peak) <= most * min(P, M)


@pytest.mark.parametrize(
    ("name", "P", "M", "makespan", "span", "peak"),
    [
        ("gpipe", 4, 8, 33, 33, 8),
        ("1f1b", 4, 8, 33, 33, 4),
        ("interleaved", 4, 8, 28.5, 28.5, 11),
        ("zb_h1", 4, 8, 27, 27, 4),
        ("zb_v", 4, 8, 25.5, 25.5, 8),
        ("gpipe", 8, 32, 117, 117, 32),
        ("1f1b", 8, 32, 117, 117, 8),
        ("interleaved", 8, 32, 106.5, 106.5, 23),
        ("zb_h1", 8, 32, 103, 103, 8),
        ("zb_v", 8, 32, 99.5, 99.5, 16),
    ],
)
def test_known_figures_at_unit_costs(name, P, M, makespan, span, peak):
    timeline = schedules.get(name)(P, M).simulate()
    assert timeline.makespan == makespan
    assert timeline.span <= span
    assert max(timeline.peak) == peak


SOME_COSTS = [
    Costs(),
    Costs(F=1, I=1.2, W=0.7),
    Costs(latency=0.25),
    Costs(F=1, I=1, W=2, latency=0.5),
    Costs(I=0.5, W=0.5, bandwidth=4, nbytes=1),
    Costs(jitter=0.2, seed=5),
]


@pytest.mark.parametrize("some", SOME_COSTS)
@pytest.mark.parametrize(("name", "most"), [("zb_h1", 1), ("zb_v", 2)])
def test_ordering_for_costs_is_never_slower_and_holds_no_more(name, most, some):
    for P, M in FEW_SIZES:
        uniform = schedules.get(name)(P, M)
        ordered = schedules.get(name)(P, M, costs=some)
        ordered.check()
        assert simulate(ordered, some).makespan <= simulate(uniform, some).makespan
        assert max(ordered.simulate().peak) <= most * P


@pytest.mark.parametrize(
    ("name", "some", "at_most"),
    [
        ("zb_h1", Costs(latency=1), 0.96),
        ("zb_v", Costs(latency=0.25), 0.90),
        ("zb_v", Costs(latency=1), 0.83),
        ("zb_v", Costs(I=1.5, W=0.5), 0.84),
        ("zb_v", Costs(I=2), 0.87),
    ],
)
def test_ordering_for_costs_gains_where_passes_differ_or_transfers_take_time(name, some, at_most):
    ordered, uniform = schedules.get(name)(4, 8, costs=some), schedules.get(name)(4, 8)
    share = simulate(ordered, some).makespan / simulate(uniform, some).makespan
    assert share <= at_most


def test_ordering_for_a_graph_knows_its_empty_passes():
    graph = Graph(4, Graph.chain(4).values, empty=frozenset({(0, "I")}))
    some = Costs(F=(1,) * 4, I=(1,) * 4, W=(2, 1, 1, 1))
    made, uniform = schedules.zb_h1(4, 8, costs=some, graph=graph), schedules.zb_h1(4, 8)
    base = simulate(uniform, some, graph=graph).makespan
    assert simulate(made, some, graph=graph).makespan <= base


def test_scaled_costs_give_the_same_order():
    some = Costs(F=0.9, I=1.1, W=0.8, latency=0.3, bandwidth=7, nbytes=1)
    for factor in (1e-6, 3.0, 1e6):
        for name in ("zb_h1", "zb_v"):
            function = schedules.get(name)
            assert function(4, 8, costs=some.scaled(factor)) == function(4, 8, costs=some)


@pytest.mark.parametrize("name", schedules.names())
def test_examples_in_docstrings_are_true(name):
    function = schedules.get(name)
    names = {"schedules": schedules, **vars(schedules)}
    found = doctest.DocTestParser().get_doctest(function.__doc__, names, name, None, 0)
    assert len(found.examples) >= 2
    assert doctest.DocTestRunner().run(found).failed == 0


def test_get_returns_what_names_lists_and_refuses_others_with_advice():
    assert schedules.names() == ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
    assert [schedules.get(name).__name__ for name in schedules.names()] == list(schedules.names())
    with pytest.raises(ScheduleError, match=r"no schedule '1f1B'.*Did you mean '1f1b'\?.*gpipe"):
        schedules.get("1f1B")
    with pytest.raises(ScheduleError, match=r"It has gpipe, 1f1b"):
        schedules.get("something else")


@pytest.mark.parametrize("name", schedules.names())
def test_sizes_that_are_none_are_refused(name):
    for P, M in ((0, 4), (4, 0), (-1, 2), (2, 1.5)):
        with pytest.raises(ScheduleError, match="must be an integer >= 1"):
            schedules.get(name)(P, M)


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules.names())
def test_large_schedules_are_made_in_seconds(name):
    import time

    begin = time.perf_counter()
    schedules.get(name)(16, 512)
    assert time.perf_counter() - begin < 5
