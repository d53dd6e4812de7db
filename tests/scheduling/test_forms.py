"""Reading inverts writing in every form, and what is not a schedule is refused with its place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Action, Schedule
from jaxpipe.scheduling.files import from_csv, from_json, to_csv, to_json
from jaxpipe.scheduling.text import from_text, to_text

from .random_schedules import any_schedules, graphs, valid_schedules

GOOD = {
    "format": "jaxpipe.schedule",
    "version": 1,
    "name": "1f1b",
    "devices": 2,
    "stages": 2,
    "microbatches": 2,
    "placement": [0, 1],
    "orders": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
}


def refusal(read, *args, **kwargs):
    with pytest.raises(ScheduleError) as error:
        read(*args, **kwargs)
    return str(error.value)


@given(any_schedules())
@settings(max_examples=200, deadline=None)
def test_json_inverts_itself(schedule):
    again = from_json(to_json(schedule))
    assert again == schedule
    assert again.name == schedule.name


@given(any_schedules())
@settings(max_examples=200, deadline=None)
def test_text_with_its_placement_inverts_itself_up_to_unused_microbatches(schedule):
    if any(schedule.orders):
        again = Schedule.parse(str(schedule), placement=schedule.placement)
        assert (again.orders, again.placement) == (schedule.orders, schedule.placement)


@st.composite
def runnable(draw):
    return draw(valid_schedules(draw(graphs(edges=False))))


@given(runnable())
@settings(max_examples=100, deadline=None)
def test_text_and_csv_of_a_complete_schedule_invert_themselves(schedule):
    assert from_text(to_text(schedule)) == schedule
    assert from_csv(to_csv(schedule)) == schedule


@given(any_schedules(), st.sampled_from(["json", "txt", "csv"]))
@settings(max_examples=200, deadline=None)
def test_load_inverts_save_or_save_refuses(tmp_path_factory, schedule, ending):
    path = tmp_path_factory.getbasetemp() / f"schedule.{ending}"
    try:
        schedule.save(path)
    except ScheduleError as error:
        assert ending != "json"
        assert "Save it as .json" in str(error)
    else:
        assert Schedule.load(path) == schedule


def test_the_json_is_that_of_the_format_page(tmp_path):
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", name="1f1b")
    schedule.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text()) == GOOD


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "x"}, "format is 'x', not 'jaxpipe.schedule'"),
        ({"version": 2}, "version is 2; this jaxpipe reads version 1"),
        ({"version": True}, "version is True"),
        ({"version": "1"}, "version is '1'"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"devices": "2"}, 'devices must be an integer, got "2"'),
        ({"devices": 2.0}, "devices must be an integer, got 2.0"),
        ({"devices": True}, "devices must be an integer, got true"),
        ({"devices": 0}, "needs devices >= 1, got 0"),
        ({"devices": 3}, "orders has 2 entries for 3 devices"),
        ({"stages": 3}, "placement has 2 entries for 3 stages"),
        ({"microbatches": 1}, "0F1 at position 1 of device 0: its microbatch is 1"),
        ({"placement": {"0": 0}}, "placement must be an array"),
        ({"placement": [0, None]}, "placement[1] must be an integer, got null"),
        ({"placement": [0, 7]}, "puts stage 1 on device 7, but devices are 0..1"),
        ({"orders": "0F0"}, "orders must be an array"),
        ({"orders": [["0F0"], "1F0"]}, "orders[1] must be an array"),
        ({"orders": [["0F0"], [10]]}, "orders[1][0] must be a string, got 10"),
        ({"orders": [["0F0"], ["1F0", "2F0junk"]]}, "orders[1][1]: '2F0junk' is not an action"),
        ({"orders": [["0F0"], ["1F0\n"]]}, "orders[1][0]: '1F0\\n' is not an action"),
        ({"extra": 1}, "the key 'extra' is not part of version 1"),
        ({"orders": None}, "orders must be an array, got null"),
    ],
)
def test_json_that_is_no_schedule_is_refused_with_its_path(tmp_path, change, words):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GOOD, **change}))
    message = refusal(Schedule.load, path)
    assert message.startswith(f"{path}: ")
    assert words in message


@pytest.mark.parametrize("key", [key for key in GOOD if key not in ("format", "version")])
def test_json_without_a_key_is_refused(key):
    data = {k: v for k, v in GOOD.items() if k != key}
    assert f"the key '{key}' is missing" in refusal(from_json, json.dumps(data))


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON: line 1, column 2"),
        ("", "not JSON: line 1, column 1"),
        ("[]", "the file must be an object"),
        ("{}", "format is None"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ("[" * 100_000, "recursion"),
        ('{"version": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_broken_json_is_refused(text, words):
    assert words in refusal(from_json, text)


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0 2F0junk", "line 1, column 5: '2F0junk' is not an action"),
        ("0F0 0B0\n1F0  1X0", "line 2, column 6: '1X0'"),
        ("\n\n0F0 f", "line 3, column 5: 'f'"),
        ("0F0,0B0", "line 1, column 1: '0F0,0B0'"),
        ("0F-1", "line 1, column 1: '0F-1'"),
        ("0F01", "'0F01' is not an action"),
        ("0f0", "'0f0' is not an action"),
        ("٣F0", "'٣F0' is not an action"),
        ("0F9999999999", "is not an action"),
        ("0F0 -", "line 1, column 5: '-'"),
        ("0F0\n\n1F0", "line 2 is empty; an idle device is written -"),
        ("", "empty; give one line per device"),
        (" \n ", "empty; give one line per device"),
        ("-", "no line has an action"),
        ("0F0\n0B0", "0B0 stands on line 2 and 0F0 on line 1, but one device holds a stage"),
        ("0F0\n2F0", "stage 1 has no action though stage 2 has"),
    ],
)
def test_text_that_is_no_schedule_is_refused_with_line_and_column(text, words):
    assert words in refusal(Schedule.parse, text)


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_a_reader(text):
    for read in (from_text, from_csv, from_json):
        try:
            read(text)
        except ScheduleError:
            continue
        except Exception as error:  # a hidden fault, whatever its type
            raise AssertionError(f"{read.__name__} on {text!r}") from error


def test_idle_devices_and_windows_line_ends_are_read():
    assert Schedule.parse("-\r\n0F0 0B0\r\n").placement == (1,)
    assert str(Schedule.parse("\n   0F0 0B0\n   -\n")) == "0F0 0B0\n-"


def test_placement_may_be_given_with_the_text():
    schedule = Schedule.parse("0F0\n-", placement=[0, 1])
    assert (schedule.stages, schedule.devices) == (2, 2)
    with pytest.raises(ScheduleError, match=r"its stage is 3, but stages are 0\.\.1"):
        Schedule.parse("3F0\n-", placement=[0, 1])


def test_torch_csv_is_read():
    text = "0F0,0F1,,(0F2;0B0)OVERLAP_F_B,,0B1,0B2\n,1F0,1I0,1W0,1F1,1B1,1F2,1B2\n"
    assert str(from_csv(text)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1I0 1W0 1F1 1B1 1F2 1B2"
    assert str(from_csv('0F0, 0B0\r\n""\r\n')) == "0F0 0B0\n-"


def test_csv_has_one_cell_per_time_step():
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert to_csv(schedule) == "0F0,0F1,,,0B0,,,0B1,\n,1F0,1B0,,1F1,1B1,,,\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0,2F0junk", "row 1, column 2: '2F0junk' is not an action"),
        ("0F0\n,1F", "row 2, column 2: '1F'"),
        ("0F0,(0F1;0B0x)OVERLAP_F_B", "row 1, column 2: '0B0x'"),
        ("0F0,0SEND_F0", "row 1, column 2: '0SEND_F0' is communication; only compute actions"),
        ("0UNSHARD,0F0", "row 1, column 1: '0UNSHARD' is communication"),
        ('"0F0', "not CSV"),
        ("0F0\n0B0", "0B0 stands on row 2 and 0F0 on row 1"),
    ],
)
def test_csv_that_is_no_schedule_is_refused_with_row_and_column(text, words):
    assert words in refusal(from_csv, text)


def test_files_are_named_in_errors(tmp_path):
    assert "cannot be read: No such file" in refusal(Schedule.load, tmp_path / "none.json")
    assert "not .yaml" in refusal(Schedule.load, tmp_path / "s.yaml")
    assert "without an ending" in refusal(Schedule.parse("0F0").save, tmp_path / "s")
    (tmp_path / "s.txt").write_bytes(b"0F0 \xff")
    assert "not UTF-8 text, byte 4" in refusal(Schedule.load, tmp_path / "s.txt")
    (tmp_path / "s.txt").write_text("0F0 0B0 bad")
    message = refusal(Schedule.load, tmp_path / "s.txt")
    assert message.startswith(f"{tmp_path / 's.txt'}: line 1, column 9: 'bad'")


def test_a_loaded_text_is_named_after_its_file(tmp_path):
    (tmp_path / "mine.txt").write_text("0F0 0B0\n")
    assert Schedule.load(tmp_path / "mine.txt").name == "mine"


def test_grid_shows_time():
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert format(schedule, "grid") == (
        "device 0  F0 F1 .  .  B0--- .  B1---\ndevice 1  .  F0 B0--- F1 B1--- .  ."
    )
    assert f"{schedule}" == format(schedule, "text") == str(schedule)
    with pytest.raises(ValueError, match=r'"text" and "grid"'):
        format(schedule, "svg")


def test_grid_of_a_deadlock_is_refused():
    with pytest.raises(ScheduleError, match="deadlock"):
        format(Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"), "grid")


def test_actions_read_and_print():
    assert repr(Action(12, "W", 3)) == str(Action(12, "W", 3)) == "12W3"


def test_comments_and_paths_that_are_none(tmp_path):
    text = "# two devices\n0F0 0B0\n  # the last\n1F0 1B0\n"
    assert Schedule.parse(text) == Schedule.parse("0F0 0B0\n1F0 1B0")
    with pytest.raises(ScheduleError, match="line 3, column 5"):
        Schedule.parse("# a\n0F0 0B0\n1F0 x")
    for call, words in (
        (lambda: Schedule.parse(3), "is a str, not 3"),
        (lambda: Schedule.load(3), "a str or a Path, not 3"),
        (lambda: Schedule.parse("0F0 0B0").save(tmp_path / "no" / "a.json"), "cannot be written"),
    ):
        with pytest.raises(ScheduleError, match=words):
            call()
