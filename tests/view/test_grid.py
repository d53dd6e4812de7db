"""The time grid shows every action at its time, plain when piped and coloured on terminals."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxpipe import schedules
from jaxpipe.scheduling import Costs, Schedule, simulate
from jaxpipe.view.grid import cells, print_grid, render_grid, unit_of

SOME = [
    Costs(),
    Costs(latency=0.25),
    Costs(F=1, I=2, W=0.5),
    Costs(jitter=0.3, seed=1),
    Costs(F=3e9, I=7.1e9, W=1e8),
]


def texts(made):
    short = made.stages == made.devices
    return [
        [f"{a.kind}{a.microbatch}" if short else str(a) for a in order] for order in made.orders
    ]


@given(
    st.sampled_from(schedules.names()), st.integers(1, 5), st.integers(1, 7), st.sampled_from(SOME)
)
@settings(max_examples=60, deadline=None)
def test_every_action_has_a_cell_in_its_order_and_rows_are_equally_long(name, P, M, some):
    timeline = schedules.get(name)(P, M).simulate(some)
    rows = cells(timeline, unit_of(timeline))
    assert [[c.text for c in row if c.fill] for row in rows] == texts(timeline.schedule)
    assert len({sum(c.width for c in row) for row in rows}) == 1
    written = [re.findall(r"\d*[FBIW]\d+", line) for line in render_grid(timeline).splitlines()]
    assert written == texts(timeline.schedule)


@given(st.sampled_from(schedules.names()), st.integers(1, 5), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_cells_stand_exactly_at_their_times_where_these_divide(name, P, M):
    timeline = schedules.get(name)(P, M).simulate()
    unit = unit_of(timeline)
    for device, row in enumerate(cells(timeline, unit)):
        at, found = 0, []
        for cell in row:
            if cell.fill:
                found.append((at * unit, (at + cell.width) * unit))
            at += cell.width
        expected = list(zip(timeline.starts[device], timeline.ends[device], strict=True))
        assert [x for pair in found for x in pair] == pytest.approx(
            [x for pair in expected for x in pair]
        )


def test_format_of_a_schedule_is_its_grid():
    made = schedules.one_f_one_b(2, 2)
    assert format(made, "grid") == render_grid(made)
    assert render_grid(made) == (
        "device 0  F0 F1 .  .  B0--- .  B1---\ndevice 1  .  F0 B0--- F1 B1--- .  ."
    )


def test_a_piped_grid_has_no_colours_and_no_breaks():
    out = io.StringIO()
    print_grid(schedules.zb_v(4, 16), console=Console(file=out, width=40))
    assert out.getvalue() == render_grid(schedules.zb_v(4, 16)) + "\n"
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("name", schedules.names())
def test_a_grid_on_a_terminal_is_coloured_and_fits_its_width(name):
    out = io.StringIO()
    made = schedules.get(name)(3, 9)
    console = Console(file=out, width=60, force_terminal=True, color_system="truecolor")
    print_grid(made, console=console)
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    lines = plain.splitlines()
    assert max(map(len, lines)) <= 60
    for device, wanted in enumerate(texts(made)):
        own = [line for line in lines if line.startswith(f"device {device}")]
        assert len(own) > 1
        assert re.findall(r"\d*[FBIW]\d+", " ".join(line[10:] for line in own)) == wanted


def test_an_idle_device_and_empty_passes_leave_dots():
    assert render_grid(Schedule.parse("0F0 0B0\n-")) == "device 0  F0 B0---\ndevice 1  .  .  ."
    nothing = simulate(Schedule.parse("0F0"), Costs(F=0))
    assert render_grid(nothing) == "device 0"
