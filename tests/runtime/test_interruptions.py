"""Steps that are broken off, and calls that come at once: what follows is right, and nothing waits.

Each test runs in a process of its own with a watchdog: what would hang is killed with its stacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import faulthandler
faulthandler.dump_traceback_later(120, exit=True)
import os, random, signal, threading, time
import jax, jax.numpy as jnp, numpy as np
import jaxpipe as jp

def net(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((jp.stage_boundary(x) if i else x) @ w)
    return x

def loss(params, x):
    return jnp.mean(net(params, x) ** 2)

keys = jax.random.split(jax.random.key(0), 5)
params = [jax.random.normal(k, (4, 4)) for k in keys[:4]]
batch = jax.random.normal(keys[4], (8, 4))

def pipe(fun=loss, **options):
    return jp.pipeline(fun, **{"schedule": "1f1b", "microbatches": 4, **options})

def same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(a, b)

f = pipe()
want = f.value_and_grad(params, batch)
"""


def run(code: str) -> str:
    emulated = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code) + "\nprint('all is well')"],
        env={**os.environ, **emulated}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("all is well\n"), done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_interrupt_while_work_is_handed_out_leaves_nothing_behind(when):
    run(f"""
    workers, hand_out = f.workers, f.workers.submit
    def interrupted(jobs):
        if {when!r} == "between":
            for number, job in enumerate(jobs[:2]):
                workers.submit_to(number, job)
        elif {when!r} == "after":
            hand_out(jobs)
        raise KeyboardInterrupt
    workers.submit = interrupted
    for call in (lambda: f.value_and_grad(params, batch), lambda: f(params, batch)):
        try:
            call()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no interrupt")
    workers.submit = hand_out
    for _ in range(3):
        same(f.value_and_grad(params, batch), want)
    """)


def test_interrupts_at_any_moment_end_the_step_and_the_next_is_right():
    out = run("""
    random.seed(0)
    armed, count = threading.Event(), 0

    def interrupt():
        while True:
            armed.wait()
            time.sleep(random.random() * 0.01)
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    until = time.time() + 8
    while time.time() < until:
        try:
            armed.set()
            while armed.is_set():
                f.value_and_grad(params, batch)
            time.sleep(0.1)
        except KeyboardInterrupt:
            count += 1
        same(f.value_and_grad(params, batch), want)
    print("interrupts:", count)
    """)
    assert int(out.split("interrupts:")[1].split()[0]) > 10


def test_calls_of_several_kinds_from_several_threads_do_not_wait_for_each_other():
    run("""
    g = pipe()  # cold: nothing is traced or compiled, no thread has been started
    half, results, errors = batch[:4], {}, []
    calls = {
        "gradients": lambda: g.value_and_grad(params, batch),
        "evaluation": lambda: g(params, batch),
        "other shape": lambda: g.value_and_grad(params, half),
        "other pipeline": lambda: f.value_and_grad(params, batch),
    }
    def many(name):
        try:
            for _ in range(25):
                results.setdefault(name, []).append(calls[name]())
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=many, args=(name,)) for name in calls for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors
    for name, made in results.items():
        assert len(made) == 50
        for each in made:
            same(each, calls[name]())
    own = [t for t in threading.enumerate() if t.name.startswith("jaxpipe device")]
    assert len(own) == 8, own
    """)


@pytest.mark.parametrize("callback", ["pure_callback", "debug.callback"])
def test_a_callback_that_calls_its_own_pipeline_is_refused_and_others_may_be_called(callback):
    run(f"""
    plain = loss(params, batch)
    def make(other):
        def called(x):
            got = other[0](params, batch)
            assert jnp.allclose(got, plain)
            return np.zeros((), np.float32)
        def fun(params, x):
            if {callback!r} == "pure_callback":
                zero = jax.pure_callback(called, jax.ShapeDtypeStruct((), jnp.float32), x)
            else:
                zero, _ = 0.0, jax.debug.callback(called, x)
            return loss(params, x) + zero
        return fun
    box = [f]
    g = pipe(make(box))
    value = g(params, batch)
    box[0] = g
    try:
        g(params, batch)
    except jp.PipelineError as error:
        assert "one of its own stages" in str(error), error
    else:
        raise AssertionError("not refused")
    box[0] = f
    assert g(params, batch) == value
    """)
