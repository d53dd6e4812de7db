"""Laws of instruction lists: they run, they hold exactly what they say, and they never block."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import (
    Accumulate,
    Action,
    Free,
    Graph,
    Recv,
    Run,
    Schedule,
    Send,
    Value,
    placements,
    plan,
)

from .random_schedules import graphs, maker, reads, valid_schedules


@st.composite
def planned(draw, **sizes):
    graph = draw(graphs(max_stages=sizes.pop("max_stages", 4)))
    schedule = draw(valid_schedules(graph, **sizes))
    return plan(schedule, graph, accumulate=draw(st.sampled_from(["index", "arrival"])))


def outputs(graph, actions):
    """{action: {value index}}: what a run of the action makes."""
    table = {action: set() for action in actions}
    for index, value in enumerate(graph.values):
        if value.producer in graph.empty:
            continue
        for m in {action.microbatch for action in actions}:
            producer = maker(value.producer, m, actions)
            if producer is None:
                continue
            readers = {maker(of, m, actions) for of in value.readers}
            inside = producer.kind == "B" and readers == {producer}
            if value.kept or not inside:
                table[producer].add(index)
    return table


def follow(result):
    """Execute the walk on sets; yields (device, index, bytes held) and checks every step."""
    graph, schedule = result.graph, result.schedule
    actions = set(schedule.actions())
    read, made = reads(graph, actions), outputs(graph, actions)
    held = [set() for _ in result.lists]
    pending = [set() for _ in result.lists]
    at = [0] * schedule.devices
    flying = None
    for device, index in result.walk:
        assert index == at[device]
        at[device] += 1
        instruction = result.lists[device][index]
        assert flying is None or isinstance(instruction, Recv)
        match instruction:
            case Run(action, reuse, accumulate):
                m = action.microbatch
                assert {(v, m) for v in read[action]} <= held[device]
                assert set(reuse) <= read[action]
                assert all(graph.values[v].reusable for v in reuse)
                held[device] -= {(v, m) for v in reuse}
                assert not held[device] & {(v, m) for v in made[action]}
                held[device] |= {(v, m) for v in made[action]}
                if not accumulate:
                    assert action.kind in "BW"
                    pending[device].add((action.stage, m))
            case Send(value, m, to):
                assert (value, m) in held[device]
                assert to != device
                flying = (value, m, device, to)
            case Recv(value, m, source):
                assert flying == (value, m, source, device)
                assert (value, m) not in held[device]
                held[device].add((value, m))
                flying = None
            case Free(value, m):
                held[device].remove((value, m))
            case Accumulate(stage, m):
                pending[device].remove((stage, m))
        size = sum(graph.values[v].nbytes for v, _ in held[device])
        size += sum(graph.gradient_nbytes[s] for s, _ in pending[device])
        yield device, index, size
    assert at == [len(instructions) for instructions in result.lists]
    assert not any(pending)
    for device, left in enumerate(held):
        kept = {
            (v, action.microbatch)
            for action in schedule.orders[device]
            for v in made[action]
            if graph.values[v].kept
        }
        assert left == kept


@given(planned())
@settings(max_examples=150, deadline=None)
def test_walk_finds_every_value_and_leaves_only_what_is_kept(result):
    for device, index, size in follow(result):
        assert result.live[device][index] == size
    assert result.peaks == tuple(max(live, default=0) for live in result.live)


@given(planned())
@settings(max_examples=60, deadline=None)
def test_each_device_runs_its_order_without_empty_passes(result):
    for order, instructions in zip(result.schedule.orders, result.lists, strict=True):
        ran = [i.action for i in instructions if isinstance(i, Run)]
        empty = result.graph.empty

        def works(action, empty=empty):
            passes = "IW" if action.kind == "B" else action.kind
            return any((action.stage, kind) not in empty for kind in passes)

        assert ran == [action for action in order if works(action)]


@given(planned())
@settings(max_examples=60, deadline=None)
def test_a_value_is_sent_once_to_each_device_that_reads_it(result):
    sent = [
        (i.value, i.microbatch, device, i.to)
        for device, instructions in enumerate(result.lists)
        for i in instructions
        if isinstance(i, Send)
    ]
    actions = set(result.schedule.actions())
    placement = result.schedule.placement
    wanted = set()
    for action, values in reads(result.graph, actions).items():
        for v in values:
            source = placement[result.graph.values[v].producer[0]]
            if source != placement[action.stage]:
                wanted.add((v, action.microbatch, source, placement[action.stage]))
    wanted = {w for w in wanted if result.graph.values[w[0]].producer not in result.graph.empty}
    assert sorted(sent) == sorted(wanted)
    assert set(result.links) == {(source, to) for _, _, source, to in sent}


def every_interleaving_finishes(lists):
    """Whether sends and receives that block until both are reached finish in every order."""
    lists = [[i for i in each if isinstance(i, Run | Send | Recv)] for each in lists]
    end = tuple(map(len, lists))
    seen, todo = set(), [(0,) * len(lists)]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        following = []
        for device, index in enumerate(at):
            if index == end[device]:
                continue
            instruction = lists[device][index]
            moved = [device]
            if isinstance(instruction, Send):
                other = instruction.to
                meets = Recv(instruction.value, instruction.microbatch, device)
                if at[other] == end[other] or lists[other][at[other]] != meets:
                    continue
                moved.append(other)
            elif isinstance(instruction, Recv):
                continue  # moves with its Send
            following.append(tuple(i + (d in moved) for d, i in enumerate(at)))
        if not following and at != end:
            return False
        todo += following
    return True


@given(planned(max_stages=3, max_microbatches=2))
@settings(max_examples=60, deadline=None)
def test_blocking_transfers_finish_in_every_interleaving(result):
    assert every_interleaving_finishes(result.lists)


def receive_before_use(lists):
    """The naive lists that DESIGN warns of: every receive stands just before its reader."""
    output, cotangent = 2, 3  # of Graph.chain(2)
    naive = []
    for each in lists:
        receives = {(i.value, i.microbatch): i for i in each if isinstance(i, Recv)}
        out = []
        for i in each:
            if isinstance(i, Run):
                value = output if i.action.kind == "F" else cotangent
                out += filter(None, [receives.get((value, i.action.microbatch))])
            if not isinstance(i, Recv):
                out.append(i)
        naive.append(out)
    return naive


def test_receives_just_before_use_deadlock_1f1b():
    """What `plan` avoids, and a sign that the interleaving test can fail."""
    assert every_interleaving_finishes(receive_before_use(plan(one_f_one_b(2, 1)).lists))
    assert not every_interleaving_finishes(receive_before_use(plan(one_f_one_b(2, 4)).lists))
    assert every_interleaving_finishes(plan(one_f_one_b(2, 4)).lists)


def one_f_one_b(devices, microbatches):
    orders = []
    for d in range(devices):
        warm = min(microbatches, devices - 1 - d)
        order = [Action(d, "F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [Action(d, "F", warm + i), Action(d, "B", i)]
        order += [Action(d, "B", i) for i in range(microbatches - warm, microbatches)]
        orders.append(order)
    return Schedule(devices, devices, microbatches, range(devices), orders, "1f1b")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_chain_peaks_of_1f1b_are_min_m_p_minus_d(devices, microbatches):
    peaks = plan(one_f_one_b(devices, microbatches)).peaks
    assert peaks == tuple(min(microbatches, devices - d) for d in range(devices))


def test_receive_slots_count():
    """With bytes on edges a device holds what it received beside its activations."""
    graph = Graph.chain(2, activation=10, edge=1)
    result = plan(Schedule.parse("0F0 0B0\n1F0 1B0"), graph)
    assert result.live[1][:3] == (1, 11 + 0, 10)
    assert result.peaks == (11, 11)


@given(planned())
@settings(max_examples=100, deadline=None)
def test_gradients_are_added_in_microbatch_order(result):
    in_order = all(
        [a.microbatch for a in order if a.stage == s and a.kind in "BW"]
        == sorted(a.microbatch for a in order if a.stage == s and a.kind in "BW")
        for order in result.schedule.orders
        for s in range(result.schedule.stages)
    )
    accumulates = [i for each in result.lists for i in each if isinstance(i, Accumulate)]
    if in_order:
        assert not accumulates
    again = plan(result.schedule, result.graph, accumulate="index")
    for stage in range(result.schedule.stages):
        added = []
        for i in again.lists[result.schedule.placement[stage]]:
            if isinstance(i, Run) and i.accumulate and i.action.kind in "BW":
                if i.action.stage == stage and (stage, "W") not in result.graph.empty:
                    added.append(i.action.microbatch)
            elif isinstance(i, Accumulate) and i.stage == stage:
                added.append(i.microbatch)
        assert added == sorted(added)
    arrival = plan(result.schedule, result.graph, accumulate="arrival")
    assert all(i.accumulate for each in arrival.lists for i in each if isinstance(i, Run))


def test_a_pending_gradient_is_counted_until_its_turn():
    graph = Graph(1, (), (7,))
    schedule = Schedule.parse("0F0 0F1 0F2 0B2 0B1 0B0")
    result = plan(schedule, graph)
    assert result.lists[0][3:] == (
        Run(Action(0, "B", 2), (), False),
        Run(Action(0, "B", 1), (), False),
        Run(Action(0, "B", 0)),
        Accumulate(0, 1),
        Accumulate(0, 2),
    )
    assert result.live[0] == (0, 0, 0, 7, 14, 14, 7, 0)
    assert plan(schedule, graph, accumulate="arrival").peaks == (0,)
    with pytest.raises(ScheduleError, match="accumulate is"):
        plan(schedule, graph, accumulate="later")


def test_only_a_last_reader_that_gives_cotangents_reuses():
    values = (
        Value("x", 1, (0, "F"), ((1, "F"),)),
        Value("dx", 4, (1, "I"), ((0, "I"), (0, "W")), reusable=True),
    )
    graph = Graph(2, values, (0, 0))
    result = plan(Schedule.parse("0F0 0I0 0W0\n1F0 1B0"), graph)
    runs = [i for i in result.lists[0] if isinstance(i, Run)]
    assert [run.reuse for run in runs] == [(), (), ()]
    assert any(isinstance(i, Free) and i.value == 1 for i in result.lists[0])
    whole = plan(Schedule.parse("0F0 0B0\n1F0 1B0"), graph)
    assert [run.reuse for run in whole.lists[0] if isinstance(run, Run)] == [(), (1,)]


def test_forward_only_frees_residuals_at_once():
    result = plan(Schedule.parse("0F0 0F1\n1F0 1F1"))
    assert result.peaks == (1, 1)
    assert result.live[0][-1] == result.live[1][-1] == 0


def test_two_stages_of_one_device_share_one_transfer():
    values = (Value("x", 1, (0, "F"), ((1, "F"), (2, "F"))),)
    schedule = Schedule.parse("0F0\n1F0 2F0")
    result = plan(schedule, Graph(3, values))
    assert result.lists[0] == (Run(Action(0, "F", 0)), Send(0, 0, 1), Free(0, 0))
    assert result.lists[1] == (
        Recv(0, 0, 0),
        Run(Action(1, "F", 0)),
        Run(Action(2, "F", 0)),
        Free(0, 0),
    )


def test_neighbouring_stages_on_one_device_need_no_transfer():
    schedule = Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert schedule.placement == placements.vee(2)
    sends = [i for each in plan(schedule).lists for i in each if isinstance(i, Send)]
    assert len(sends) == 4  # 0 -> 1 and 2 -> 3, and back


def test_plan_of_a_deadlock_says_what_check_says():
    with pytest.raises(ScheduleError, match="deadlock"):
        plan(Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))


def test_plan_is_readable():
    text = str(plan(one_f_one_b(2, 2)))
    assert "send output of stage 0 [1] to device 1" in text
    assert "device 1, peak 1" in text


def test_plan_of_a_long_schedule_takes_seconds():
    schedule = one_f_one_b(16, 512)
    begin = time.perf_counter()
    result = plan(schedule)
    assert time.perf_counter() - begin < 10
    assert result.peaks == tuple(16 - d for d in range(16))
