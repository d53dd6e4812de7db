"""The command line: exit codes, and the words for input that cannot be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe import cli
from jaxpipe.commands.demo import emulate_cpu_devices
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule_source import build, read_source
from jaxpipe.scheduling import Schedule

pytestmark = pytest.mark.smoke

OWN = """
from jaxpipe.scheduling import B, F, schedule

@schedule
def own(device, devices, microbatches):
    for i in range(microbatches):
        yield F(i)
    for i in range(microbatches):
        yield B(i)
"""


def call(*args: str) -> int:
    """Parse and run in this process; the exit code."""
    try:
        return cli.main(cli.parser().parse_args(args))
    except SystemExit as end:
        return end.code


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_command_runs_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.cli", "show", "1f1b", "-p", "2", "-m", "2"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "device 1" in done.stdout and "makespan 9" in done.stdout


def test_bad_input_in_a_process_of_its_own_is_one_sentence_and_exit_code_1():
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.cli", "demo", "--schedule=1f2b"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "'1f2b'" in done.stderr and "1f1b" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "args", [["--help"], ["demo", "--help"], ["show", "--help"], ["check", "--help"]]
)
def test_help_has_examples(args, capsys):
    assert call(*args) == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "jaxpipe" in out


def test_version_is_printed(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("jaxpipe ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--nonsense"], ["--nonsense", "--help"]),
        ([], ["COMMAND"]),
        (["dmeo"], ["dmeo", "demo"]),
        (["demo", "--steps=0"], ["--steps", ">= 1", "'0'"]),
        (["demo", "--devices=x"], ["--devices", "'x'"]),
        (["demo", "--seed=-1"], ["--seed", ">= 0"]),
        (["demo", "--schedule=1f1"], ["'1f1'", "1f1b"]),
        (["demo", "--schedule=missing.py"], ["no file missing.py"]),
        (["demo", "--schedule=missing.json"], ["no file missing.json"]),
        (["demo", "--schedule=some/where"], ["some/where", ".py", ".json"]),
        (["demo", "--schedule=interleaved(chunk=2)"], ["chunk", "chunks"]),
        (["demo", "--schedule=interleaved(2"], ["interleaved(2"]),
        (["demo", "--text=missing.txt"], ["--text", "missing.txt"]),
        (["demo", "--width=130"], ["--width 130", "4"]),
        (["demo", "--out=step.gif"], ["step.gif", ".svg"]),
        (["demo", "--out=no/where/step.svg"], ["no folder no/where"]),
        (["demo", "--batch=16", "--microbatches=3"], ["--batch 16", "3 equal microbatches"]),
        (["demo", "--layers=3", "--devices=4"], ["4 stages on 4 devices", "--layers 3"]),
        (["demo", "--schedule=zb_v", "--layers=7", "--devices=4"], ["8 stages", "--layers 7"]),
        (["demo", "--devices=64", "--layers=64"], ["64 devices", "there are"]),
        (["show", "1f1b", "-p", "0"], ["-p", ">= 1"]),
        (["show", "1f1b", "-o", "x.gif"], ["x.gif", ".svg", ".json"]),
        (["check", "missing.csv"], ["no file missing.csv"]),
        (["check", "mine.yaml"], ["mine.yaml", ".json", ".csv"]),
    ],
)  # fmt: skip
def test_bad_input_is_exit_code_1_and_a_sentence(args, words, capsys):
    assert call(*args) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_short_text_is_refused_with_both_numbers(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert call("demo", f"--text={short}") == 1
    assert "129" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".json", ".txt", ".csv"])
def test_show_writes_a_schedule_that_check_reads(ending, tmp_path, capsys):
    out = tmp_path / f"saved{ending}"
    assert call("show", "zb_h1", "-p", "3", "-m", "5", "-o", str(out)) == 0
    assert call("check", str(out)) == 0
    assert "3 devices, 3 stages, 5 microbatches" in capsys.readouterr().out
    assert Schedule.load(out) == build(
        read_source("zb_h1"), called="zb_h1", devices=3, microbatches=5
    )


def test_show_writes_a_picture(tmp_path):
    out = tmp_path / "picture.svg"
    assert call("show", "1f1b", "-p", "2", "-m", "2", "-o", str(out)) == 0
    drawn = out.read_text()
    assert "<svg" in drawn
    assert call("show", "1f1b", "-p", "2", "-m", "2", "-o", str(out)) == 0
    assert out.read_text() == drawn


def test_schedules_lists_the_library(capsys):
    assert call("schedules") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("gpipe", "1f1b", "interleaved", "chunks=2", "zb_v"))


def test_check_says_what_is_wrong(tmp_path, capsys):
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("0F0 0B0\n1B0 1F0\n")
    assert call("check", str(wrong)) == 1
    assert "1B0" in capsys.readouterr().err


def test_saved_schedule_of_other_sizes_is_refused_with_both_numbers(tmp_path, capsys):
    saved = tmp_path / "saved.json"
    assert call("show", "1f1b", "-p", "2", "-m", "4", "-o", str(saved)) == 0
    assert call("check", str(saved), "-p", "3") == 1
    assert "2 devices" in (said := capsys.readouterr().err) and "--devices is 3" in said


def test_python_file_gives_the_schedule_it_defines(own):
    schedule = build(read_source(str(own)), called="own.py", devices=2, microbatches=3)
    assert (schedule.name, schedule.devices, schedule.microbatches) == ("own", 2, 3)


def test_python_file_with_several_schedules_needs_a_name(own):
    own.write_text(OWN + "\nother = schedule(own.__wrapped__, name='other')\n")
    with pytest.raises(ScheduleError, match=r"2 schedules: own, other.*own\.py:own"):
        read_source(str(own))
    assert read_source(f"{own}:other").__name__ == "other"
    with pytest.raises(ScheduleError, match="does not define nothing; it defines own, other"):
        read_source(f"{own}:nothing")


def test_a_finished_schedule_beside_its_function_is_passed_over(own):
    own.write_text(OWN + "\nmine = own(devices=2, microbatches=2)\n")
    assert read_source(str(own)).__name__ == "own"
    assert read_source(f"{own}:mine").devices == 2
    with pytest.raises(ScheduleError, match="takes no options"):
        read_source(f"{own}:mine(lag=2)")


def test_a_schedule_of_a_file_may_be_given_options(own):
    own.write_text(OWN.replace("microbatches):", "microbatches, lag=1):"))
    assert read_source(f"{own}:own(lag=2)").keywords == {"lag": 2}


def test_an_environment_that_asks_for_what_is_not_there_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxpipe.cli", "demo"],
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "JAX_PLATFORMS=nonsense" in done.stderr and "Traceback" not in done.stderr


def test_imported_schedules_are_not_the_files_own(own):
    own.write_text("from jaxpipe.schedules import gpipe, zb_v\n" + OWN)
    assert read_source(str(own)).__name__ == "own"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no schedule"),
        (OWN.replace("@schedule", ""), "Does own lack its @jp.schedule"),
        ("\nx = 1 / 0\n", r"own\.py:2: ZeroDivisionError"),
        ("\n\nx = (\n", r"own\.py:3: SyntaxError"),
        ("import no_such_module_here\n", r"own\.py:1: ModuleNotFoundError"),
    ],
)
def test_python_file_without_a_schedule_says_why(own, text, words):
    own.write_text(text)
    with pytest.raises(ScheduleError, match=words):
        read_source(str(own))


def test_python_file_may_import_its_neighbours(own):
    (own.parent / "neighbour_of_own.py").write_text("MANY = 3\n")
    own.write_text("import neighbour_of_own\n" + OWN)
    assert read_source(str(own)).__name__ == "own"
    assert str(own.parent) not in sys.path


def test_emulated_devices_respect_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=1")
    emulate_cpu_devices(4)
    assert os.environ["XLA_FLAGS"] == "--xla_some_flag=1 --xla_force_host_platform_device_count=4"
    emulate_cpu_devices(2)
    assert os.environ["XLA_FLAGS"].endswith("=4")
