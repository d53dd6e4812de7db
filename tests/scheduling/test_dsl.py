"""The generator form: what is yielded is what is run, and mistakes are told where they stand."""

import functools
import inspect

import numpy as np
import pytest

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Action, B, F, I, Schedule, W, placements, resolve, schedule


@schedule
def one_f_one_b(device, devices, microbatches):
    """Warm up, alternate, drain."""
    warmup = min(microbatches, devices - 1 - device)
    for i in range(warmup):
        yield F(i)
    for i in range(microbatches - warmup):
        yield F(warmup + i)
        yield B(i)
    for i in range(microbatches - warmup, microbatches):
        yield B(i)


@schedule(placement=placements.loop)
def by_chunk(device, devices, microbatches, *, chunks=3, split=False):
    for c in range(chunks):
        for i in range(microbatches):
            yield F(i, chunk=c)
    for c in reversed(range(chunks)):
        for i in range(microbatches):
            if split:
                yield I(i, chunk=c)
                yield W(i, chunk=c)
            else:
                yield B(i, chunk=c)


def refusal(function, *args, **kwargs):
    with pytest.raises(ScheduleError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_the_designs_example_is_1f1b():
    made = one_f_one_b(devices=2, microbatches=2)
    assert str(made) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert made == one_f_one_b(2, 2) == schedules.get("1f1b")(devices=2, microbatches=2)
    assert made.name == "one_f_one_b"


@pytest.mark.parametrize("devices", range(1, 5))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 9])
def test_any_size_is_complete(devices, microbatches):
    one_f_one_b(devices, microbatches).check()
    assert by_chunk(devices, microbatches, chunks=2).stages == 2 * devices


def test_a_schedule_function_shows_itself():
    assert one_f_one_b.__name__ == "one_f_one_b"
    assert one_f_one_b.__doc__ == "Warm up, alternate, drain."
    assert "device" in inspect.signature(one_f_one_b.__wrapped__).parameters
    assert repr(one_f_one_b) == "<schedule function one_f_one_b>"
    assert one_f_one_b.stages(4) == 4
    assert by_chunk.stages(devices=4) == 12
    assert by_chunk.stages(4, chunks=2) == by_chunk.stages(4, chunks=2, split=True) == 8


def test_options_reach_generator_and_placement_and_name():
    made = by_chunk(devices=2, microbatches=2, chunks=2, split=True)
    assert made.placement == (0, 1, 0, 1)
    assert made.name == "by_chunk(chunks=2, split=True)"
    assert made.kind_of(0) == "IW"
    assert by_chunk(2, 2).placement == (0, 1) * 3  # the generator's default reaches the placement


def test_an_option_of_the_placement_alone_is_accepted():
    @schedule(placement=placements.wave)
    def down_and_up(device, devices, microbatches, **options):
        chunks = 2 * options["w"]
        for i in range(microbatches):
            yield from (F(i, chunk=c) for c in range(chunks))
            yield from (B(i, chunk=c) for c in reversed(range(chunks)))

    assert down_and_up(1, 2, w=2).stages == 4
    assert down_and_up.stages(3) == 6

    @schedule(placement=lambda devices, depth: tuple(range(devices)) * depth)
    def needs_depth(device, devices, microbatches):
        yield F(0)

    assert "needs a value for the option depth" in refusal(needs_depth, 1, 1)


def test_tuples_and_lambdas_are_placements_and_actions_may_name_stages():
    @schedule(placement=(0, 1, 1, 0), stages=4)
    def vee(device, devices, microbatches):
        inner = (0, 3) if device == 0 else (1, 2)
        yield F(0)
        yield Action(inner[1], "F", 0)
        yield B(0, chunk=1)
        yield B(0)

    assert vee(2, 1).placement == (0, 1, 1, 0)
    assert "puts stage 1 on device 1, but devices are 0..0" in refusal(vee, 1, 1)

    @schedule(stages=lambda devices: devices + 1)
    def odd(device, devices, microbatches):
        yield F(0)

    assert "says that it has 3 stages on 2 devices, but its placement places 2" in refusal(
        odd, 2, 1
    )


def test_lists_are_taken_for_generators():
    @schedule
    def listed(device, devices, microbatches):
        return [kind(i) for kind in (F, B) for i in range(microbatches)]

    assert str(listed(1, 2)) == "0F0 0F1 0B0 0B1"


def make(*items, **options):
    @schedule(**options)
    def mine(device, devices, microbatches):
        yield from items

    return mine


@pytest.mark.parametrize(
    "function, words",
    [
        (make(F(0), "0B0"), "device 0, position 1: '0B0' is not an action"),
        (make(F), "position 0: F (call it with a microbatch) is not an action"),
        (make(F(0), None), "position 1: None is not an action"),
        (
            make(F(0), B(1)),
            "position 1: B(1) has microbatch 1, but microbatch numbers here are 0..0",
        ),
        (make(F(0, chunk=2)), "F(0, chunk=2) has chunk 2, but chunk numbers here are 0..0"),
        (make(F(-1)), "F(-1) has microbatch -1"),
        (make(F(0.0)), "the microbatch of F(0.0) is not an integer"),
        (make(F(True)), "is not an integer"),
        (make(F(0)), "mine"),
        (make(placement=lambda devices: 3), "its placement is 3, not a tuple of devices"),
        (make(placement=lambda devices: 1 // 0), "its placement raised ZeroDivisionError"),
        (make(placement=(0, 5)), "puts stage 1 on device 5"),
    ],
)
def test_mistakes_of_a_generator_are_told_where_they_stand(function, words):
    message = refusal(function, 1, 1) if words != "mine" else "mine"
    assert words in message


def test_a_lost_backward_is_told_with_the_schedules_name():
    @schedule
    def half(device, devices, microbatches):
        yield F(0)
        if device == 0:
            yield B(0)

    assert refusal(half, 2, 1).startswith("Schedule half: 1B0 is missing: device 1 never runs")


def test_errors_raised_in_a_generator_say_which_device():
    @schedule
    def broken(device, devices, microbatches):
        yield F(0)
        yield B(1 // (1 - device) - 1)

    message = refusal(broken, 2, 1)
    assert "Schedule broken, device 1, position 1: ZeroDivisionError" in message

    @schedule
    def at_once(device, devices, microbatches):
        raise KeyError("no such")

    assert "Schedule at_once, device 0, position 0: KeyError: 'no such'" in refusal(at_once, 2, 1)

    @schedule
    def refuses(device, devices, microbatches):
        raise ScheduleError("refuses is for an even number of devices")
        yield

    assert refusal(refuses, 1, 1) == "refuses is for an even number of devices"


def test_a_generator_that_does_not_end_or_yields_nothing_is_told():
    @schedule
    def endless(device, devices, microbatches):
        while True:
            yield F(0)

    assert "does the generator end?" in refusal(endless, 2, 2)

    @schedule
    def forgot(device, devices, microbatches):
        F(0)

    assert "device 0 got None for its order; yield actions" in refusal(forgot, 1, 1)
    with pytest.raises(ScheduleError, match="decorates a generator function, got 3"):
        schedule(3)
    with pytest.raises(ScheduleError, match="must take"):
        schedule(lambda device, microbatches: ())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"devices": 0, "microbatches": 1}, "devices must be an integer >= 1, got 0"),
        ({"devices": 1, "microbatches": 0}, "microbatches must be an integer >= 1, got 0"),
        ({"devices": 1.5, "microbatches": 1}, "devices must be an integer >= 1, got 1.5"),
        (
            {"devices": 1, "microbatches": 1, "chunk": 1},
            "has no option chunk; did you mean chunks?",
        ),
        ({"devices": 1, "microbatches": 1, "xyz": 1}, "its options are chunks, split"),
        ({"devices": 1, "microbatches": 1, "chunks": 0}, "chunks must be an integer >= 1, got 0"),
    ],
)
def test_bad_sizes_and_options_are_refused(arguments, words):
    assert words in refusal(by_chunk, **arguments)
    assert "it takes none" in refusal(one_f_one_b, 1, 1, chunks=2)


def test_numbers_may_be_numpys_and_a_failing_count_of_stages_is_told():
    @schedule(placement=lambda devices: tuple(np.arange(devices)))
    def own(device, devices, microbatches):
        yield from map(F, np.arange(microbatches))
        yield from map(B, np.arange(microbatches))

    assert own(np.int64(2), np.int32(2)).placement == (0, 1)
    assert all(type(device) is int for device in own(2, 2).placement)

    @schedule(stages=lambda devices: 1 // 0)
    def broken(device, devices, microbatches):
        yield F(0)

    assert "number of stages raised ZeroDivisionError" in refusal(broken, 1, 1)


def test_what_is_no_generator_function_is_refused():
    for given in (3, int, "F"):
        assert "decorates a generator function" in refusal(schedule, given)


def test_the_library_says_how_options_are_given():
    assert "get('interleaved')(" in refusal(schedules.get, "interleaved(chunks=4)")


def test_kinds_are_letters_and_make_actions():
    assert (F, B, I, W) == ("F", "B", "I", "W")
    assert repr((F, B)) == "(F, B)"
    assert F(3) == F(3, chunk=0) != F(3, 1)


def test_resolve_takes_every_way_of_naming_a_schedule():
    made = one_f_one_b(4, 8)
    for given in (made, one_f_one_b, functools.partial(one_f_one_b), "1f1b", " 1f1b() "):
        assert resolve(given, 4, 8) == made
    four = resolve("interleaved(chunks=4)", 2, 4)
    assert four == resolve(functools.partial(schedules.get("interleaved"), chunks=4), 2, 4)
    assert four.stages == 8


@pytest.mark.parametrize(
    "given, words",
    [
        ("1f1", "no schedule '1f1' in the library; did you mean 1f1b"),
        ("zzz", "there are "),
        ("", "'' is not the name of a schedule"),
        ("interleaved(chunks=4", "is not the name of a schedule"),
        ("interleaved(4)", "options are given by name"),
        ("interleaved(**{})", "options are given by name"),
        ("interleaved(chunks=)", "cannot be read"),
        ("interleaved(chunks=__import__('os'))", "values are Python literals"),
        ("interleaved(chunks=1)(2)", "cannot be read"),
        ("interleaved(chunk=4)", "did you mean chunks?"),
        (3, "3 is no schedule"),
        ("mine.json", "Schedule.load"),
        ("some/mine.py", "import the schedule function"),
        ("0F0 0B0\n1F0 1B0", "Schedule.parse"),
        ("zb_h1(costs=3)", "costs are jaxpipe.Costs"),
        (one_f_one_b(2, 3), "is for 2 devices, but 4 devices are asked for"),
        (one_f_one_b(4, 3), "is for 3 microbatches, but 8 microbatches are asked for"),
        (lambda devices, microbatches: 5, "is 5, not a Schedule"),
        (lambda device: 5, "cannot be called as a schedule function"),
        (lambda devices, microbatches: one_f_one_b(2, 8), "is for 2 devices"),
    ],
)
def test_resolve_refuses_with_advice(given, words):
    assert words in refusal(resolve, given, 4, 8)


def test_a_finished_schedule_is_returned_as_it_is():
    made = Schedule.parse("0F0 0B0")
    assert resolve(made, 1, 1) is made
