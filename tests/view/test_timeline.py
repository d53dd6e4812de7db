"""The picture of a timeline: the right file, every bar, figures written out, no global state."""

import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.collections import PolyCollection

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import Costs, Graph, Schedule
from jaxpipe.view.palette import KIND_COLORS, color, text_color
from jaxpipe.view.timeline import draw, save_timeline
from jaxpipe.view.units import flops, nbytes

STARTS = {".svg": b"<?xml", ".png": b"\x89PNG\r\n", ".pdf": b"%PDF-"}


def written(figure):
    """All texts of a figure."""
    (axes,) = figure.axes
    found = [text.get_text() for text in (*figure.texts, *axes.texts)]
    found += [label.get_text() for label in axes.get_yticklabels()]
    return found + [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("ending", STARTS)
def test_the_ending_says_what_is_written(tmp_path, ending):
    timeline = schedules.zb_v(3, 4).simulate(Costs(latency=0.5))
    path = tmp_path / f"step{ending}"
    timeline.save(path)
    assert path.read_bytes().startswith(STARTS[ending])
    again = tmp_path / f"again{ending.upper()}"
    save_timeline(timeline, str(again), title="a title")
    assert again.read_bytes().startswith(STARTS[ending])


def test_another_ending_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ScheduleError, match=r"step\.gif.*\.svg, \.png or \.pdf"):
        save_timeline(schedules.gpipe(2, 2).simulate(), tmp_path / "step.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0F0 0B0", "0F0 3F0 3B0 0I0 0W0\n1F0 2F0 2I0 2W0 1B0"])
def test_the_legend_is_inside_the_picture(text):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(Schedule.parse(text).simulate())
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(renderer), figure.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0
    label = figure.axes[0].xaxis.label.get_window_extent(renderer)
    assert not box.overlaps(label)


@pytest.mark.parametrize("name", schedules.names())
def test_every_action_has_a_bar_of_its_time_on_its_device(name):
    timeline = schedules.get(name)(3, 5).simulate(Costs(F=1, I=2, W=0.5, latency=0.25))
    (axes,) = draw(timeline).axes
    bars = []
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and len(collection.get_paths()) > 0:
            for path in collection.get_paths():
                (left, top), (right, _), (_, bottom) = path.vertices[:3]
                if bottom - top == pytest.approx(0.58) and len(path.vertices) == 5:
                    bars.append((int(top), round(left, 6), round(right, 6)))
    expected = [
        (device, round(start, 6), round(end, 6))
        for device in range(3)
        for start, end in zip(timeline.starts[device], timeline.ends[device], strict=True)
    ]
    assert sorted(bars) == sorted(expected)


def test_figures_and_microbatches_are_written_out():
    timeline = schedules.one_f_one_b(4, 8).simulate()
    found = written(draw(timeline, title="My step"))
    assert "My step" in found
    (totals,) = (text for text in found if "makespan" in text)
    for part in (
        "4 devices",
        "8 microbatches",
        "makespan 33",
        "span 33",
        "bubble 27.3 %",
        "peak 4",
    ):
        assert part in totals
    assert [f"peak {n}" for n in (4, 3, 2, 1)] == [t for t in found if t.startswith("peak")]
    for microbatch in range(8):
        assert found.count(str(microbatch)) == 2 * 4
    assert {"F forward", "B backward", "memory held"} <= set(found)


def test_peaks_of_a_model_are_written_as_bytes():
    graph = replace(Graph.chain(2, activation=3_500_000), lines=("model.py:1", "model.py:9"))
    timeline = schedules.gpipe(2, 2).simulate(graph=graph)
    assert "peak 7 MB" in written(draw(timeline))


@pytest.mark.parametrize("text", ["0F0", "0F0 0B0\n-", "0F0 0F1\n1F0 1F1"])
def test_small_and_odd_schedules_can_be_drawn(tmp_path, text):
    made = Schedule.parse(text)
    made.simulate().save(tmp_path / "a.png")
    made.simulate(Costs(F=0, I=0, W=0)).save(tmp_path / "b.png")


def test_drawing_leaves_pyplot_alone(tmp_path):
    code = (
        "import sys; from jaxpipe import schedules;"
        f"schedules.gpipe(2, 2).simulate().save({str(tmp_path / 'a.svg')!r});"
        "assert 'matplotlib.pyplot' not in sys.modules and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pictures_are_the_same_each_time(tmp_path):
    timeline = schedules.zb_h1(2, 3).simulate()
    for path in ("a.png", "b.png"):
        timeline.save(tmp_path / path)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_kinds_and_chunks_have_colours_of_their_own_and_readable_text():
    fills = [color(kind, chunk, 4) for kind in KIND_COLORS for chunk in range(4)]
    assert len(set(fills)) == len(fills)
    assert {text_color(fill) for fill in fills} == {"#000000", "#FFFFFF"}


def test_units_round_into_the_next_prefix():
    assert nbytes(999.4) == "999 B"
    assert nbytes(999.6) == "1 kB"
    assert nbytes(999_600) == "1 MB"
    assert flops(2.5e12) == "2.5 TFLOP"
