"""Training steps equal plain optax under one jit, leaf for leaf, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from tests.meshes import assert_close, assert_equal, pipe_mesh

D, ROWS, M = 8, 12, 3
RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)


def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    return {
        "table": jax.random.normal(next(keys), (D, D)),  # tied: first and last stage
        "layers": [
            {"w": jax.random.normal(next(keys), (D, D)) / 2, "b": jnp.zeros(D)} for _ in range(4)
        ],
        "count": jnp.int32(3),
        "nothing": None,
    }


def make_batch(seed=1):
    keys = jax.random.split(jax.random.key(seed))
    return {k: jax.random.normal(key, (ROWS, D)) for k, key in zip("xy", keys, strict=True)}


def loss(params, batch):
    x = batch["x"] @ params["table"]
    for layer in params["layers"]:
        x = jp.stage_boundary(x)
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params["table"].T / params["count"] - batch["y"]) ** 2)


def pipe(fun=loss, *, devices=4, schedule="1f1b", m=M, **options):
    return jp.pipeline(fun, schedule=schedule, microbatches=m, mesh=pipe_mesh(devices), **options)


def trainable(tree):
    return {"table": tree["table"], "layers": tree["layers"]}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "clip adamw schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(RATE, weight_decay=0.1)
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "masked decay": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("1f1b", 4),
        pytest.param("zb_h1", 2, marks=pytest.mark.slow),
        pytest.param("zb_v", 2, marks=pytest.mark.slow),
    ],
)
def test_training_steps_equal_plain_optax(name, schedule, devices):
    params, optimizer = make_params(), OPTIMIZERS[name]()
    f = pipe(schedule=schedule, devices=devices)
    step = f.train_step(optimizer)
    state = step.init(params, make_batch())

    @jax.jit
    def plain_step(trained, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss({**params, **p}, batch))(trained)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, value, optax.tree.norm(grads)

    plain = trainable(params)
    opt_state = optimizer.init(plain)
    for number in range(4):
        batch = make_batch(number)
        state, metrics = step(state, batch)
        plain, opt_state, value, norm = plain_step(plain, opt_state, batch)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    assert int(state.step) == 4
    whole = f.gather(state.params)
    assert int(whole["count"]) == 3 and whole["nothing"] is None
    for ours, theirs in zip(jax.tree.leaves(trainable(whole)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_every_leaf_of_the_state_is_on_the_device_of_its_stage():
    f = pipe()
    step = f.train_step(optax.adamw(1e-2))
    state = step.init(make_params(), make_batch())
    for _ in range(2):
        state, metrics = step(state, make_batch())
        placed = f.place(make_params())
        moments = state.opt_state[0]
        for i in range(4):
            for name in "wb":
                home = placed["layers"][i][name].sharding
                assert state.params["layers"][i][name].sharding == home
                assert moments.mu["layers"][i][name].sharding.device_set == home.device_set
        assert len(state.params["table"].sharding.device_set) == 2  # tied
        assert len(moments.nu["table"].sharding.device_set) == 1  # updated once
        assert len(metrics["loss"].sharding.device_set) == 4


def test_copies_of_a_tied_leaf_stay_bitwise_equal():
    f = pipe()
    step = f.train_step(optax.adam(1e-1))
    state = step.init(make_params(), make_batch())
    for number in range(3):
        state, _ = step(state, make_batch(number))
    first, second = (np.asarray(s.data) for s in state.params["table"].addressable_shards)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, make_params()["table"])


def test_training_is_bitwise_repeatable_and_equal_across_schedules_of_equal_programs():
    def run(schedule):
        step = pipe(schedule=schedule).train_step(OPTIMIZERS["clip adamw schedule"]())
        state = step.init(make_params(), make_batch())
        for number in range(3):
            state, metrics = step(state, make_batch(number))
        return state, metrics

    first = run("1f1b")
    assert_equal(run("1f1b"), first)
    assert_equal(run("gpipe"), first)


def test_state_is_donated_unless_told_otherwise():
    params, batch = make_params(), make_batch()
    given = jax.tree.map(lambda a: np.array(a), params)
    step = pipe().train_step(optax.adam(1e-2))
    state = step.init(params, batch)
    _, _ = step(state, batch)
    assert state.params["layers"][0]["w"].is_deleted()
    assert_equal(jax.tree.map(np.asarray, params), given)  # the user's own arrays are safe

    step = pipe(donate=False).train_step(optax.adam(1e-2))
    state = step.init(params, batch)
    first, _ = step(state, batch)
    again, _ = step(state, batch)
    assert_equal(first, again)


def test_what_was_gathered_outlives_the_next_step():
    f = pipe()
    step = f.train_step(optax.sgd(0.1))
    state = step.init(make_params(), make_batch())
    whole = f.gather(state)
    kept = jax.tree.map(np.array, whole)
    for _ in range(2):
        state, _ = step(state, make_batch())
    assert_equal(jax.tree.map(np.asarray, whole), kept)


def test_unplaced_state_is_copied_and_stays_alive():
    params, batch = make_params(), make_batch()
    optimizer = optax.sgd(0.1)
    step = pipe().train_step(optimizer)
    state = step.init(params)  # not traced yet: leaves stay where they are
    new, _ = step(state, batch)
    assert not state.params["table"].is_deleted()
    placed = pipe().train_step(optimizer)
    other, _ = placed(placed.init(params, batch), batch)
    assert_equal(new.params, other.params)


def test_an_update_function_of_ones_own_sees_state_grads_and_aux():
    def with_aux(params, batch):
        value = loss(params, batch)
        return value, {"value": value}

    def update(state, grads, aux):
        """SGD with an exponential moving average; a step with a large gradient is skipped."""
        fine = optax.tree.norm(grads) < 1e6
        params = jax.tree.map(lambda p, g: jnp.where(fine, p - 0.1 * g, p), state.params, grads)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state.opt_state, params)
        new = replace(state, step=state.step + 1, params=params, opt_state=ema)
        return new, {"largest": jnp.max(aux["value"]), "skipped": ~fine}

    params = trainable(make_params()) | {"count": 3.0}
    f = pipe(with_aux, has_aux=True)
    step = f.train_step(update)
    state = step.init(params, make_batch(), opt_state=params)
    plain, ema = params, params
    for number in range(3):
        batch = make_batch(number)
        state, metrics = step(state, batch)
        grads = jax.grad(loss)(plain, batch)
        plain = jax.tree.map(lambda p, g: p - 0.1 * g, plain, grads)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, plain)
        assert metrics["aux"]["value"].shape == (M,)
        np.testing.assert_allclose(metrics["largest"], metrics["aux"]["value"].max())
        assert not metrics["skipped"]
    for ours, theirs in (
        (f.gather(state.params), plain),
        (f.gather(state.opt_state), ema),
    ):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_optimizers_get_the_loss_as_value():
    def scale_by_loss(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: -0.1 * value * u, updates), state + value

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.GradientTransformationExtraArgs(lambda p: jnp.zeros(()), scale_by_loss),
    )
    f = pipe()
    params, batch = make_params() | {"count": jnp.float32(3)}, make_batch()
    step = f.train_step(optimizer)
    state = step.init(params, batch)
    state, metrics = step(state, batch)
    value, grads = f.value_and_grad(params, batch)
    changes, opt_state = optimizer.update(grads, optimizer.init(params), params, value=value)
    assert float(metrics["loss"]) == float(value)
    assert_close(f.gather(state.params), optax.apply_updates(params, changes))
    assert_close(f.gather(state.opt_state), opt_state)


def test_an_array_that_occurs_twice_in_a_state_is_copied():
    f = pipe()
    params, batch = make_params(), make_batch()
    f.lower(params, batch)
    placed = f.place(params)
    placed["layers"] = [placed["layers"][0]] * 4
    optimizer = optax.sgd(0.1)
    again = jp.TrainState(jnp.int32(0), jax.tree.map(jnp.copy, placed), optimizer.init({}))
    step = f.train_step(optimizer)
    first, _ = step(jp.TrainState(jnp.int32(0), placed, optimizer.init({})), batch)
    second, _ = step(again, batch)
    assert_equal(f.gather(first.params), f.gather(second.params))


def test_a_state_has_replace_as_flaxs_has():
    state = pipe().train_step(optax.sgd(0.1)).init(make_params(), make_batch())
    assert int(state.replace(step=jnp.int32(7)).step) == 7
    assert state.replace(step=3).params is state.params


def test_random_keys_reach_the_loss_of_a_training_step():
    def noisy(params, batch, rng):
        return loss(params, {**batch, "x": batch["x"] + jax.random.normal(rng, (D,))})

    step = pipe(noisy).train_step(optax.sgd(0.1))
    state = step.init(make_params(), make_batch(), rng=jax.random.key(0))
    values = []
    for seed in (0, 1):
        state, metrics = step(state, make_batch(), rng=jax.random.key(seed))
        values.append(float(metrics["loss"]))
    assert values[0] != values[1]


def test_loss_falls_over_training_and_live_memory_is_flat():
    step = pipe().train_step(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    batch = make_batch()
    state = step.init(make_params(), batch)
    losses, held = [], []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        held.append(sum(a.nbytes for a in jax.live_arrays()))
    assert losses[-1] < 0.5 * losses[0]
    assert held[-1] == held[3]


def test_an_update_that_changes_the_structure_of_the_state_is_refused():
    def update(state, grads, aux):
        return replace(state, opt_state={"new": jnp.ones(2)}), {}

    step = pipe().train_step(update)
    state = step.init(make_params(), make_batch())
    with pytest.raises(jp.PipelineError, match=r"new"):
        step(state, make_batch())
