"""Pipelined equals plain JAX: values, gradients and training steps, for the library's schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp

KEY = jax.random.key(0)


def make_params(n=8, d=8):
    keys = jax.random.split(KEY, n)
    return [{"w": jax.random.normal(k, (d, d)) / 3, "b": jnp.zeros(d)} for k in keys]


def loss(params, batch):
    x = batch["x"]
    for i, p in enumerate(params):
        x = jnp.tanh((jp.stage_boundary(x) if i else x) @ p["w"] + p["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def make_batch(rows=24, d=8):
    return {k: jax.random.normal(jax.random.key(i), (rows, d)) for i, k in enumerate("xy")}


def mesh(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("pipe",))


def assert_trees_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.max(np.abs(a - b)) <= 1e-4 * np.max(np.abs(b)) + 1e-7
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "devices",
    [pytest.param(1, marks=pytest.mark.slow), 2, 4],  # slow: `pytest -m slow`
)
def test_loss_and_grads_equal_reference(schedule, devices, microbatches):
    params, batch = make_params(), make_batch()
    f = jp.pipeline(loss, schedule=schedule, microbatches=microbatches, mesh=mesh(devices))
    value, grads = f.value_and_grad(params, batch)
    want = jax.value_and_grad(loss)(params, batch)
    assert_trees_close((value, grads), want)
    assert_trees_close(f(params, batch), want[0])


def test_training_steps_equal_plain_optax():
    params, batch = make_params(), make_batch()
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    f = jp.pipeline(loss, schedule="1f1b", microbatches=4, mesh=mesh(4))
    step = f.train_step(optimizer)
    state = step.init(params)
    plain, opt_state = params, optimizer.init(params)
    for _ in range(3):
        state, metrics = step(state, batch)
        value, grads = jax.value_and_grad(loss)(plain, batch)
        updates, opt_state = optimizer.update(grads, opt_state, plain)
        plain = optax.apply_updates(plain, updates)
        assert abs(float(metrics["loss"]) - float(value)) <= 1e-5
    for a, b in zip(jax.tree.leaves(f.gather(state.params)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
