"""The stage table: columns that rows have, human units, sums, as text and in rich."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxpipe.errors import PipelineError
from jaxpipe.view.table import stage_table

ROWS = [
    {
        "stage": s,
        "device": s % 2,
        "segments": range(2 * s, 2 * s + 2),
        "lines": f"model.py:{10 * s + 1}-{10 * s + 9}",
        "param_nbytes": 3_000_000,
        "flops": 2e9,
        "residual_nbytes": 28_300_000,
        "vjp_residual_nbytes": 92_400_000,
        "edges": {s + 1: 65_536} if s < 2 else {},
    }
    for s in range(3)
]


def test_rows_are_aligned_and_summed():
    lines = str(stage_table(ROWS)).splitlines()
    head = lines[0]
    assert head.split("  ")[0] == "stage" and "vjp residuals" in head and "edges out" in head
    assert len(lines) == 1 + 1 + 3 + 1 + 1
    for heading, values in (("source lines", "model.py:11-19"), ("segments", "2-3")):
        assert lines[3].index(values) == head.index(heading)
    for heading, value, total in (
        ("params", "3 MB", "9 MB"),
        ("FLOPs", "2 GFLOP", "6 GFLOP"),
        (" residuals", "28.3 MB", "84.9 MB"),
    ):
        right = head.index(heading) + len(heading)
        assert lines[2][:right].endswith(value)
        assert lines[-1][:right].endswith(total)
    assert lines[2].endswith("-> 1: 65.5 kB")


def test_rich_shows_the_same_cells():
    out = io.StringIO()
    table = stage_table(ROWS)
    Console(file=out, width=140).print(table)
    shown = out.getvalue()
    for line in table.lines:
        assert any(all(cell in row for cell in line) for row in shown.splitlines())


def test_objects_are_rows_and_columns_without_values_are_left_out():
    rows = [SimpleNamespace(stage=0, device=1, flops=1.5e6), SimpleNamespace(stage=1, device=0)]
    assert str(stage_table(rows)) == (
        "stage  device      FLOPs\n"
        "-----  ------  ---------\n"
        "    0       1  1.5 MFLOP\n"
        "    1       0\n"
        "-----  ------  ---------\n"
        "total          1.5 MFLOP"
    )


def test_one_row_has_no_sums():
    assert len(str(stage_table(ROWS[:1])).splitlines()) == 1 + 1 + 1


def test_segments_join_runs():
    table = stage_table([{"stage": 0, "segments": (0, 1, 2, 5, 7, 8)}])
    assert "0-2, 5, 7-8" in str(table)


def test_markup_in_names_is_shown_as_it_is():
    out = io.StringIO()
    Console(file=out, width=100).print(stage_table([{"stage": 0, "lines": "f[bold].py:1"}]))
    assert "f[bold].py:1" in out.getvalue()


def test_an_unknown_column_is_refused():
    with pytest.raises(PipelineError, match="'flop', but its columns are stage, device"):
        stage_table([{"stage": 0, "flop": 1}])
