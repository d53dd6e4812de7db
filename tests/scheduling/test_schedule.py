"""A `Schedule` is frozen data whose numbers are in range."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Action, Schedule, placements

from .random_schedules import any_schedules

ONE = ((Action(0, "F", 0), Action(0, "B", 0)),)


def test_import_loads_neither_jax_nor_plots():
    code = (
        "import sys, jaxpipe.scheduling; "
        "print([m for m in ('jax', 'networkx', 'matplotlib', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "fields, words",
    [
        ((0, 1, 1, (0,), ONE), "needs devices >= 1, got 0"),
        ((1, 0, 1, (), ONE), "needs stages >= 1, got 0"),
        ((1, 1, -1, (0,), ONE), "needs microbatches >= 1, got -1"),
        ((1.0, 1, 1, (0,), ONE), "devices must be an integer, got 1.0"),
        ((True, 1, 1, (0,), ONE), "devices must be an integer, got True"),
        ((1, 2, 1, (0,), ONE), "placement has 1 entries for 2 stages"),
        ((1, 1, 1, (1,), ONE), "puts stage 0 on device 1, but devices are 0..0"),
        ((1, 1, 1, 0, ONE), "placement must be a tuple, got 0"),
        ((1, 1, 1, "0", ONE), "placement must be a tuple, got '0'"),
        ((1, 1, 1, ("0",), ONE), "placement[0] must be an integer, got '0'"),
        ((2, 1, 1, (0,), ONE), "orders has 1 entries for 2 devices"),
        ((1, 1, 1, (0,), ("0F0",)), "orders[0] must be a tuple"),
        ((1, 1, 1, (0,), (("0F0",),)), "'0F0' at position 0 of device 0 is not an action"),
        ((1, 1, 1, (0,), (((0, "X", 0),),)), "its kind is 'X', not one of F, B, I, W"),
        ((1, 1, 1, (0,), (((0, ["F"], 0),),)), "its kind is ['F']"),
        ((1, 1, 1, (0,), (((1, "F", 0),),)), "its stage is 1, but stages are 0..0"),
        ((1, 1, 1, (0,), (((0, "F", 1),),)), "its microbatch is 1, but microbatches are 0..0"),
        ((1, 1, 1, (0,), (((0, "F", -1),),)), "its microbatch is -1"),
        ((1, 1, 1, (0,), (((0, "F", 0.5),),)), "must be an integer, got 0.5"),
        ((1, 1, 1, (0,), ONE, 3), "name is a string, got 3"),
    ],
)
def test_numbers_out_of_range_are_refused(fields, words):
    with pytest.raises(ScheduleError) as error:
        Schedule(*fields)
    assert words in str(error.value)


def test_lists_and_numpy_numbers_are_taken():
    schedule = Schedule(np.int64(1), 1, 1, np.array([0]), [[(0, "F", np.int32(0)), (0, "B", 0)]])
    assert schedule == Schedule(1, 1, 1, (0,), ONE)
    assert type(schedule.placement[0]) is type(schedule.devices) is int
    assert isinstance(schedule.orders[0][0], Action)


def test_the_name_is_no_part_of_equality():
    one, other = Schedule(1, 1, 1, (0,), ONE, "a"), Schedule(1, 1, 1, (0,), ONE, "b")
    assert one == other
    assert hash(one) == hash(other)
    assert one != Schedule(1, 1, 2, (0,), ONE)


@given(any_schedules())
@settings(max_examples=50, deadline=None)
def test_copies_are_equal(schedule):
    schedule.forward_only  # noqa: B018 (fills a cache)
    assert pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule) == schedule


def test_questions():
    schedule = Schedule.parse("0F0 3F0 3I0 3W0 0B0\n1F0 2F0 2B0 1B0")
    assert [schedule.device_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert schedule.chunks(0) == (0, 3)
    assert [schedule.kind_of(s) for s in range(4)] == ["B", "B", "B", "IW"]
    assert len(list(schedule.actions())) == 9
    assert not schedule.forward_only
    mixed = Schedule.parse("0F0 0F1 0B0 0I1 0W1")
    assert mixed.kind_of(0) == "mixed"
    assert Schedule.parse("0F0").kind_of(0) == "F"


def test_forward_keeps_the_order_of_forwards():
    schedule = Schedule.parse("0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0", name="x")
    forward = schedule.forward()
    assert str(forward) == "0F1 0F0\n1F1 1F0"
    assert forward.forward_only
    assert forward.name == "x"
    assert forward.forward() == forward
    forward.check()


def test_simulate_delegates():
    assert Schedule.parse("0F0 0B0").simulate().makespan == 3


def test_placements():
    assert placements.linear(3) == (0, 1, 2)
    assert placements.loop(2, chunks=3) == (0, 1, 0, 1, 0, 1)
    assert placements.vee(3) == (0, 1, 2, 2, 1, 0) == placements.wave(3)
    assert placements.wave(2, w=2) == (0, 1, 1, 0, 0, 1, 1, 0)
    for bad in (lambda: placements.linear(0), lambda: placements.loop(2, chunks=0)):
        with pytest.raises(ScheduleError, match="must be an integer >= 1, got 0"):
            bad()
