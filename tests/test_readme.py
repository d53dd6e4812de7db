"""The README: its Python runs as written, its files and commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe import Schedule, cli
from jaxpipe.schedule_source import read_source

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess:
    emulated = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env={**os.environ, **emulated}, check=False, capture_output=True, text=True,
    )  # fmt: skip


def test_readme_has_python():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_python_of_the_readme_runs(block, tmp_path):
    done = run_python(BLOCKS[block], tmp_path)
    assert done.returncode == 0, done.stderr


def test_schedule_of_the_readme_trains_its_model(tmp_path):
    code = BLOCKS[1] + BLOCKS[0].replace('schedule="1f1b"', "schedule=patient_1f1b")
    assert "schedule=patient_1f1b" in code
    done = run_python(code + "\nprint('drawn', (tmp := __import__('os')).listdir())", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step.svg" in done.stdout


def test_python_of_the_guide_runs(tmp_path):
    page = (ROOT / "docs/guide.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) > 6
    done = run_python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr


def test_first_lines_of_the_readme_are_the_two_commands():
    commands = re.findall(r"^    (pip install .*)$", README, flags=re.MULTILINE)
    assert commands == ["pip install . && jaxpipe demo", "pip install -e '.[test]' && pytest"]


def test_files_of_the_page_on_schedule_files_can_be_read(tmp_path):
    page = (ROOT / "docs/schedule_files.md").read_text()
    blocks = re.findall(
        r"^## `(\.\w+)`[^\n]*\n\n(?:\S[^\n]*\n)*\n?((?:    [^\n]*\n)+)", page, re.MULTILINE
    )
    assert [ending for ending, _ in blocks] == [".txt", ".json", ".csv"]
    for ending, text in blocks:
        (tmp_path / f"a{ending}").write_text(re.sub("^    ", "", text, flags=re.MULTILINE))
        schedule = Schedule.load(tmp_path / f"a{ending}")
        schedule.check()
        assert (schedule.devices, schedule.microbatches) == (2, 2)


def test_the_own_schedule_of_the_readme_is_the_one_of_its_file(tmp_path):
    (tmp_path / "my_schedule.py").write_text(BLOCKS[1])
    assert read_source(str(tmp_path / "my_schedule.py")).__name__ == "patient_1f1b"


def test_files_that_the_readme_names_exist():
    named = re.findall(
        r"\]\(([\w./]+)\)|`((?:schedules|examples|benchmarks|docs)/[\w./]*)`", README
    )
    for path in filter(None, (part for pair in named for part in pair)):
        assert (ROOT / path).exists(), path


def test_commands_that_the_readme_names_parse():
    for line in re.findall(r"`?(jaxpipe (?:demo|show|check|schedules)[^`\n]*)", README):
        words = line.split("#")[0].split()[1:]
        if "--help" not in words:
            cli.parser().parse_args(words)
