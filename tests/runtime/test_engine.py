"""Laws of the engine on a stage graph written by hand."""

from __future__ import annotations

import gc
import threading
import time
from queue import SimpleQueue

import jax
import numpy as np
import pytest
from chain import arrays, chain, reference

from jaxpipe.errors import PipelineError
from jaxpipe.lower.compile import compile_jobs
from jaxpipe.lower.jobs import step_jobs
from jaxpipe.lower.place import make_layout, place_leaf
from jaxpipe.runtime import lockstep
from jaxpipe.runtime.execute import Engine
from jaxpipe.runtime.transport import DevicePutTransport
from jaxpipe.runtime.workers import Workers
from jaxpipe.scheduling import Schedule
from jaxpipe.scheduling.instructions import plan


def gpipe(p, m):
    rows = [[*(f"{d}F{i}" for i in range(m)), *(f"{d}B{i}" for i in range(m))] for d in range(p)]
    return Schedule.parse("\n".join(" ".join(row) for row in rows))


def one_f_one_b(p, m):
    rows = []
    for d in range(p):
        warm = min(m, p - 1 - d)
        row = [f"{d}F{i}" for i in range(warm)]
        for i in range(m - warm):
            row += [f"{d}F{warm + i}", f"{d}B{i}"]
        row += [f"{d}B{i}" for i in range(m - warm, m)]
        rows.append(" ".join(row))
    return Schedule.parse("\n".join(rows))


def split(p, m):
    """Every I at once, every W at the end."""
    rows = []
    for d in range(p):
        row = [f"{d}F{i}" for i in range(m)]
        row += [f"{d}I{i}" for i in range(m)] if d else []
        row += [f"{d}I{i}" for i in range(m)] if not d else []
        row += [f"{d}W{i}" for i in range(m)]
        rows.append(" ".join(row))
    return Schedule.parse("\n".join(rows))


def backwards(p, m):
    """Backwards in descending microbatches: every gradient but the last has to wait its turn."""
    rows = [
        [*(f"{d}F{i}" for i in range(m)), *(f"{d}B{i}" for i in reversed(range(m)))]
        for d in range(p)
    ]
    return Schedule.parse("\n".join(" ".join(row) for row in rows))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "split": split, "backwards": backwards}


def engine_of(schedule, *, width=8, batch=2, workers=None):
    graph = chain(schedule.stages, schedule.microbatches, width=width, batch=batch)
    made = plan(schedule, graph.graph)
    owners = [(schedule.placement[leaf // 2],) for leaf in range(2 * schedule.stages)]
    mesh = jax.sharding.Mesh(jax.devices()[: schedule.devices], ("pipe",))
    layout = make_layout(mesh, "pipe", owners, [jax.P()] * len(owners))
    _, data = arrays(schedule.stages, schedule.microbatches, width=width, batch=batch)
    table = step_jobs(
        graph,
        made.lists,
        layout,
        microbatches=schedule.microbatches,
        rules=["mean"],
        batch=[jax.typeof(leaf) for leaf in data],
        axes=(0, 0),
    )
    executables = compile_jobs(table)
    workers = workers or Workers(schedule.devices)
    return Engine(
        graph, made, layout, executables, workers, DevicePutTransport(), axes=(0, 0), wait=True
    )


def load(engine, params, data):
    placed = [place_leaf(engine.layout, i, leaf, copy=False) for i, leaf in enumerate(params)]
    engine.load(placed, data)
    return placed


def step(engine, params, data):
    load(engine, params, data)
    engine.run()
    loss = float(engine.results()[0])
    grads = [np.asarray(parts[0][2]) for _, parts in sorted(engine.gradients().items())]
    engine.clear()
    return loss, grads


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 2), (4, 8)])
def test_loss_and_gradients_equal_plain_jax(name, p, m):
    schedule = SCHEDULES[name](p, m)
    params, data = arrays(p, m)
    loss, grads = step(engine_of(schedule), params, data)
    want_loss, want = reference(params, data)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for got, expected in zip(grads, want, strict=True):
        expected = np.asarray(expected)
        assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max() + 1e-7
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-7


def test_equal_stage_programs_give_equal_bits_whatever_the_schedule_and_run():
    params, data = arrays(4, 8)
    found = []
    for make in (gpipe, one_f_one_b, backwards):
        engine = engine_of(make(4, 8))
        found += [step(engine, params, data) for _ in range(3)]
    for loss, grads in found[1:]:
        assert loss == found[0][0]
        for got, expected in zip(grads, found[0][1], strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (4, 5)])
def test_live_bytes_equal_the_plan_after_every_instruction(name, p, m):
    schedule = SCHEDULES[name](p, m)
    engine = engine_of(schedule)
    params, data = arrays(p, m)
    keep = load(engine, params, data)
    for tape in engine.tapes:  # what stays for the whole step is counted apart
        for op, _ in tape.begin:
            op()
        tape.begin.clear()
    device_of = {d: i for i, d in enumerate(engine.layout.mesh.devices.flat) if i < p}
    gc.collect()
    before = lockstep.live_bytes(p, device_of)
    wrong = []

    def after(device, index, instruction):
        held = lockstep.live_bytes(p, device_of)[device] - before[device]
        if held != engine.plan.live[device][index]:
            wrong.append((device, index, instruction, held, engine.plan.live[device][index]))

    lockstep.walk(engine, after)
    assert not wrong
    assert keep


def test_live_bytes_with_threads_never_exceed_the_checked_peak():
    schedule = one_f_one_b(4, 8)
    engine = engine_of(schedule, width=64, batch=64)
    params, data = arrays(4, 8, width=64, batch=64)
    keep = load(engine, params, data)
    device_of = {d: i for i, d in enumerate(engine.layout.mesh.devices.flat) if i < 4}
    step(engine, params, data)
    load(engine, params, data)
    gc.collect()
    sums = 64 * 64 * 4 + 64 * 4
    before = lockstep.live_bytes(4, device_of)
    most = [0] * 4
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            for device, held in enumerate(lockstep.live_bytes(4, device_of)):
                most[device] = max(most[device], held - before[device])

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine.run()
    stop.set()
    watcher.join()
    assert keep
    for device, peak in enumerate(engine.plan.peaks):
        assert most[device] <= peak + sums + 4 * 9  # accumulators and losses


def test_parameters_and_batch_are_alive_and_unchanged_after_steps():
    params, data = arrays(2, 3)
    copies = [np.array(a) for a in (*params, *data)]
    engine = engine_of(one_f_one_b(2, 3))
    for _ in range(2):
        step(engine, params, data)
    for array, copy in zip((*params, *data), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def fail_at(engine, device, index, error):
    """Make instruction ``index`` of ``device`` raise in the engine's compiled phases."""
    instruction = engine.plan.lists[device][index]

    def raises():
        raise error

    tape = engine.tapes[device]
    ops = [(raises if o is instruction else op, o) for op, o in tape.body]
    phases = list(engine._whole)
    whole = [*tape.begin, *ops, *tape.end]
    phases[device] = (tuple(op for op, _ in whole), tuple(o for _, o in whole))
    kept, engine._whole = engine._whole, tuple(phases)
    return kept


@pytest.mark.parametrize("device", [0, 1, 3])
def test_failure_names_the_action_and_cancels_the_step_everywhere(device):
    schedule = one_f_one_b(4, 8)
    engine = engine_of(schedule)
    params, data = arrays(4, 8)
    expected = step(engine, params, data)
    runs = [i for i, x in enumerate(engine.plan.lists[device]) if hasattr(x, "action")]
    kept = fail_at(engine, device, runs[3], ValueError("no such luck"))
    action = engine.plan.lists[device][runs[3]].action
    load(engine, params, data)
    start = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        engine.run()
    assert time.monotonic() - start < 5
    words = str(caught.value)
    for part in (f"Device {device}", str(action), f"stage {action.stage}",
                 f"microbatch {action.microbatch}", f"model.py:{action.stage + 1}",
                 "no such luck", "cancelled on all devices"):  # fmt: skip
        assert part in words
    assert isinstance(caught.value.__cause__, ValueError)
    engine._whole = kept
    again = step(engine, params, data)  # the engine is usable afterwards
    assert again[0] == expected[0]
    for got, want in zip(again[1], expected[1], strict=True):
        np.testing.assert_array_equal(got, want)


def test_keyboard_interrupt_cancels_and_the_engine_survives(monkeypatch):
    engine = engine_of(one_f_one_b(2, 4))
    params, data = arrays(2, 4)
    expected = step(engine, params, data)

    class Interrupted(SimpleQueue):
        def get(self):
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr("jaxpipe.runtime.execute.SimpleQueue", Interrupted)
    load(engine, params, data)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert step(engine, params, data)[0] == expected[0]


def test_threads_are_reused_and_end_with_their_workers():
    before = threading.active_count()
    workers = Workers(2)
    engine = engine_of(one_f_one_b(2, 2), workers=workers)
    params, data = arrays(2, 2)
    step(engine, params, data)
    during = {t.ident for t in threading.enumerate()}
    step(engine, params, data)
    assert {t.ident for t in threading.enumerate()} == during
    del engine, workers
    gc.collect()
    assert threading.active_count() <= before
