"""Every option of `jaxpipe.pipeline` against plain JAX, on one small model with odd leaves."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.meshes import assert_close, assert_equal, pipe_mesh

D, ROWS, M = 6, 12, 3
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]


def make_params():
    """Floats in several places; a tied table, a frozen vector, an unused leaf, None, int, key."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    return {
        "table": jax.random.normal(next(keys), (D, D)),  # first and last stage
        "layers": [jax.random.normal(next(keys), (D, D)) / 2 for _ in range(6)],
        "frozen": jax.random.normal(next(keys), (D,)),
        "unused": jnp.ones(3),
        "nothing": None,
        "count": jnp.int32(3),
        "flag": jnp.array([True, False]),
        "key": jax.random.key(5),
        "gain": jnp.float32(1.5),
    }


def make_batch(rows=ROWS):
    return {
        "x": jax.random.normal(jax.random.key(1), (rows, D)),
        "y": jax.random.normal(jax.random.key(2), (rows, D)),
        "mask": (jnp.arange(rows) % 4 != 1).astype(jnp.float32),
    }


def forward(params, batch, rng=None):
    """(rows, D): a chain with a skip, a stage without parameters, a tied table, a late leaf."""
    x = batch["x"] @ params["table"] + jax.lax.stop_gradient(params["frozen"])
    first = x
    for i, w in enumerate(params["layers"]):
        x = jp.stage_boundary(x)
        x = jax.nn.relu(x @ w) + 0.1 * x
        if rng is not None:
            x = x * jax.random.bernoulli(jax.random.fold_in(rng, i), 0.8, x.shape)
    x = jp.stage_boundary(x)
    x = jax.nn.softmax(x) * params["gain"] * params["count"]
    return x @ params["table"].T + 0.01 * first


def mean_loss(params, batch, rng=None):
    return jnp.mean((forward(params, batch, rng) - batch["y"]) ** 2)


def per_microbatch(batch, m=M):
    return [
        jax.tree.map(lambda a, i=i: a[i * (a.shape[0] // m) : (i + 1) * (a.shape[0] // m)], batch)
        for i in range(m)
    ]


def mean_of(trees):
    return jax.tree.map(
        lambda *xs: xs[0] if xs[0].dtype == jax.dtypes.float0 else sum(xs) / len(xs), *trees
    )


def pipe(fun, *, devices=4, schedule="1f1b", m=M, **options):
    return jp.pipeline(fun, schedule=schedule, microbatches=m, mesh=pipe_mesh(devices), **options)


@jp.schedule
def late_weights(device, devices, microbatches):
    for kind in (jp.F, jp.I, jp.W):
        for i in range(microbatches):
            yield kind(i)


@jp.schedule
def backwards_from_the_last(device, devices, microbatches):
    for i in range(microbatches):
        yield jp.F(i)
    for i in reversed(range(microbatches)):
        yield jp.I(i)
        yield jp.W(i)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_odd_leaves_ties_and_skips_equal_plain_gradients(schedule):
    params, batch = make_params(), make_batch()
    devices = 2 if schedule in ("interleaved", "zb_v") else 4
    f = pipe(mean_loss, schedule=schedule, devices=devices)
    plain = jax.value_and_grad(mean_loss, allow_int=True)
    want = plain(params, batch)
    assert_close(f.value_and_grad(params, batch), want)
    assert_close(f(params, batch), want[0])
    placed = f.place(params)
    loss, grads = f.value_and_grad(placed, batch)
    assert_close((loss, f.gather(grads)), want)
    assert not np.any(grads["frozen"]) and not np.any(grads["unused"])
    for leaf, grad in zip(jax.tree.leaves(placed), jax.tree.leaves(grads), strict=True):
        assert grad.dtype == jax.dtypes.float0 or grad.sharding == leaf.sharding
    assert_close(f.reference.value_and_grad(params, batch), want)


def test_gradients_come_back_where_parameters_were_given():
    params, batch = make_params(), make_batch()
    device = jax.devices()[5]
    moved = jax.device_put(params, device)
    _, grads = pipe(mean_loss).value_and_grad(moved, batch)
    assert {d for g in jax.tree.leaves(grads) if isinstance(g, jax.Array) for d in g.devices()} == {
        device
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_random_keys_are_folded_with_the_microbatch(schedule):
    params, batch, rng = make_params(), make_batch(), jax.random.key(9)
    f = pipe(mean_loss, schedule=schedule)
    want = mean_of(
        [
            jax.value_and_grad(mean_loss, allow_int=True)(params, b, jax.random.fold_in(rng, i))
            for i, b in enumerate(per_microbatch(batch))
        ]
    )
    assert_close(f.value_and_grad(params, batch, rng=rng), want)
    assert_close(f.reference.value_and_grad(params, batch, rng=rng), want)
    other = f(params, batch, rng=jax.random.key(10))
    assert float(other) != float(want[0])
    one = pipe(mean_loss, m=1)
    assert_close(one(params, batch, rng=rng), mean_loss(params, batch, jax.random.fold_in(rng, 0)))


def test_sum_adds_the_losses_of_microbatches():
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss, reduce="sum")
    pieces = [
        jax.value_and_grad(mean_loss, allow_int=True)(params, b) for b in per_microbatch(batch)
    ]
    mean = mean_of(pieces)
    want = jax.tree.map(lambda x: x if x.dtype == jax.dtypes.float0 else x * M, mean)
    assert_close(f.value_and_grad(params, batch), want)
    assert_close(f.reference.value_and_grad(params, batch), want)


def masked_sum(params, batch):
    error = jnp.mean((forward(params, batch) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_weighted_divides_once_by_the_sum_of_weights(schedule):
    params, batch = make_params(), make_batch()

    def plain(params, batch):
        total, weight = masked_sum(params, batch)
        return total / weight

    f = pipe(masked_sum, reduce="weighted", schedule=schedule)
    want = jax.value_and_grad(plain, allow_int=True)(params, batch)
    assert_close(f.value_and_grad(params, batch), want)
    assert_close(f(params, batch), want[0])
    assert_close(f.reference.value_and_grad(params, batch), want)


def test_weight_of_zero_in_one_microbatch_is_harmless_and_in_all_is_nan():
    params, batch = make_params(), make_batch()
    f = pipe(masked_sum, reduce="weighted")
    some = {**batch, "mask": batch["mask"].at[: ROWS // M].set(0.0)}
    loss, grads = f.value_and_grad(params, some)
    assert np.isfinite(loss) and np.all(np.isfinite(grads["table"]))
    loss, grads = f.value_and_grad(params, {**batch, "mask": jnp.zeros(ROWS)})
    assert np.isnan(loss) and np.all(np.isnan(grads["table"]))


def with_aux(params, batch):
    out = forward(params, batch)
    loss = jnp.mean((out - batch["y"]) ** 2)
    return loss, {"rows": out.sum(-1), "first": batch["x"][0], "constant": jnp.int32(7)}


def test_aux_gains_a_leading_axis_of_microbatches():
    params, batch = make_params(), make_batch()
    f = pipe(with_aux, has_aux=True)
    pieces = [with_aux(params, b) for b in per_microbatch(batch)]
    loss = sum(p[0] for p in pieces) / M
    aux = jax.tree.map(lambda *xs: jnp.stack(xs), *[p[1] for p in pieces])
    assert_close(f(params, batch), (loss, aux))
    value, grads = f.value_and_grad(params, batch)
    assert_close(value, (loss, aux))
    assert_close(grads, jax.grad(mean_loss, allow_int=True)(params, batch))
    assert_close(f.reference(params, batch), (loss, aux))


def test_weighted_with_aux():
    params, batch = make_params(), make_batch()
    f = pipe(lambda p, b: (masked_sum(p, b), b["mask"]), reduce="weighted", has_aux=True)
    (loss, aux), _ = f.value_and_grad(params, batch)
    total, weight = masked_sum(params, batch)
    assert_close((loss, aux), (total / weight, batch["mask"].reshape(M, -1)))


def test_concat_joins_outputs_along_out_axes():
    params, batch = make_params(), make_batch()

    def outputs(params, batch):
        out = forward(params, batch)
        return {"rows": out, "columns": out.T}

    f = pipe(outputs, reduce="concat", out_axes={"rows": 0, "columns": -1})
    out = forward(params, batch)
    assert_close(f(params, batch), {"rows": out, "columns": out.T})
    assert_close(f.reference(params, batch), {"rows": out, "columns": out.T})
    with pytest.raises(jp.PipelineError, match="no loss to differentiate"):
        f.value_and_grad(params, batch)


def test_microbatch_axes_may_differ_by_leaf_and_none_gives_the_leaf_whole():
    def loss(params, batch):
        x = jp.stage_boundary(batch["x"].T @ params["w"])
        x = jp.stage_boundary(jnp.tanh(x)) + batch["shift"]
        return jnp.mean((x * batch["scale"] - batch["y"]) ** 2)

    params = {"w": jax.random.normal(jax.random.key(0), (D, D))}
    batch = {
        "x": jax.random.normal(jax.random.key(1), (D, ROWS)),
        "y": jax.random.normal(jax.random.key(2), (ROWS, D)),
        "shift": jnp.arange(float(D)),
        "scale": 2.0,
    }
    axes = {"x": 1, "y": 0, "shift": None, "scale": None}
    f = pipe(loss, devices=2, stages=[2, 1], microbatch_axes=axes)
    assert_close(f.value_and_grad(params, batch), jax.value_and_grad(loss)(params, batch))


def test_batch_may_be_several_arguments_and_keywords():
    def loss(params, x, *, y):
        return jnp.mean((jp.stage_boundary(jnp.tanh(x @ params)) @ params - y) ** 2)

    params = jax.random.normal(jax.random.key(0), (D, D))
    batch = make_batch()
    f = pipe(loss, devices=2)
    want = jax.value_and_grad(loss)(params, batch["x"], y=batch["y"])
    assert_close(f.value_and_grad(params, batch["x"], y=batch["y"]), want)
    assert_close(f.value_and_grad(np.asarray(params), np.asarray(batch["x"]), y=batch["y"]), want)


@pytest.mark.parametrize("residuals", ["min_cut", "vjp", "recompute", ["vjp", "recompute"] * 2])
def test_every_choice_of_residuals_gives_the_same_gradients(residuals):
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss, residuals=residuals)
    want = jax.value_and_grad(mean_loss, allow_int=True)(params, batch)
    assert_close(f.value_and_grad(params, batch), want)


def test_more_recomputation_saves_fewer_bytes():
    params, batch = make_params(), make_batch()
    saved = {
        mode: sum(
            s.residual_nbytes
            for s in pipe(mean_loss, residuals=mode).lower(params, batch).stage_graph.stages
        )
        for mode in ("recompute", "min_cut", "vjp")
    }
    assert saved["recompute"] <= saved["min_cut"] < saved["vjp"]


@pytest.mark.parametrize("accumulate", ["index", "arrival"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_may_be_added_by_index_or_by_arrival(accumulate, schedule):
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss, accumulate=accumulate, schedule=schedule)
    want = jax.value_and_grad(mean_loss, allow_int=True)(params, batch)
    assert_close(f.value_and_grad(params, batch), want)


def test_bf16_parameters_accumulate_in_grad_dtype():
    params = {"w": [jnp.full((D, D), 0.1, jnp.bfloat16) for _ in range(4)]}
    batch = make_batch()

    def loss(params, batch):
        x = batch["x"].astype(jnp.bfloat16)
        for i, w in enumerate(params["w"]):
            x = jnp.tanh((jp.stage_boundary(x) if i else x) @ w)
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    f = pipe(loss, grad_dtype=jnp.float32)
    value, grads = f.value_and_grad(params, batch)
    reference = f.reference.value_and_grad(params, batch)
    assert all(g.dtype == jnp.float32 for g in grads["w"])
    np.testing.assert_allclose(value, reference[0], rtol=1e-2)
    for ours, theirs in zip(grads["w"], reference[1]["w"], strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, atol=2e-2 * float(jnp.max(jnp.abs(theirs))))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_of_parameters_alone_and_no_batch_may_cross_boundaries(schedule):
    def loss(params):
        x = params["w"][0]
        for w in params["w"][1:]:
            x = jp.stage_boundary(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(1), 9)
    params = {"w": [jax.random.normal(k, (D, D)) / 2 for k in keys]}
    got = pipe(loss, schedule=schedule).value_and_grad(params)
    assert_close(got, jax.value_and_grad(loss)(params))


def test_complex_parameters_keep_complex_sums():
    def loss(params, batch):
        x = batch["x"].astype(jnp.complex64)
        for i, w in enumerate(params["w"]):
            x = (jp.stage_boundary(x) if i else x) @ w
        return jnp.mean(jnp.abs(x) ** 2)

    params = {"w": [jnp.eye(D) * (1 + 0.5j) + 0.1 for _ in range(4)]}
    batch = make_batch()
    f = pipe(loss, grad_dtype=jnp.float32)
    (value, grads), (want, theirs) = (
        f.value_and_grad(params, batch), jax.value_and_grad(loss)(params, batch)
    )  # fmt: skip
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for ours, plain in zip(grads["w"], theirs["w"], strict=True):
        assert ours.dtype == jnp.complex64
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_integers_may_be_numpys_and_lists_any_iterable():
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss, m=np.int64(M))
    plain = f.value_and_grad(params, batch)
    counts = [len(stage.segments) for stage in f.lower(params, batch).stage_graph.stages]
    for options in (
        {"microbatches": jnp.array(M)},
        {"stages": np.array(counts)},
        {"stages": (n for n in counts)},
        {"microbatch_axes": np.int64(0)},
    ):
        assert_equal(f.replace(**options).value_and_grad(params, batch), plain)


def test_predicted_times_of_schedules_with_more_stages_can_be_compared():
    keys = jax.random.split(jax.random.key(1), 8)
    params = [jax.random.normal(k, (D, D)) for k in keys]

    def loss(params, x):
        for i, w in enumerate(params):
            x = jp.stage_boundary(x) if i else x
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    f = pipe(loss, schedule="1f1b", m=8)
    x = jnp.ones((8, D))
    times = {s: f.replace(schedule=s).lower(params, x).simulate() for s in ("1f1b", "interleaved")}
    assert sum(times["1f1b"].busy) == pytest.approx(sum(times["interleaved"].busy), rel=0.1)
    assert times["interleaved"].makespan < times["1f1b"].makespan
    assert "unit of time" in str(times["1f1b"])


def test_boundaries_names_are_in_the_stage_table():
    def loss(params, x):
        for i, w in enumerate(params):
            x = jp.stage_boundary(x, name=f"block {i}") if i else x
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    table = str(pipe(loss).lower([jnp.eye(D)] * 4, jnp.ones((M, D))))
    assert all(f"block {i}" in table for i in (1, 2, 3))


def test_a_mesh_that_was_set_does_not_matter():
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss)
    want = f.value_and_grad(params, batch)
    for mesh in (pipe_mesh(4), jax.make_mesh((2, 2), ("a", "b"))):
        g = pipe(mean_loss)
        with jax.set_mesh(mesh):
            got = g.value_and_grad(params, batch)
            assert g.lower(params, batch).memory_with_temporaries()
            g.gather(g.place(params))
            assert jax.sharding.get_mesh() == mesh
        assert_equal(got, want)


def test_arrays_that_the_function_closes_over_are_copied():
    table = np.ones((D, D), np.float32)

    def loss(params, batch):
        return mean_loss(params, batch) + jnp.sum(batch["x"] @ table)

    params, batch = make_params(), make_batch()
    f = pipe(loss)
    want = f.value_and_grad(params, batch)
    table[...] = 5.0
    assert_equal(f.value_and_grad(params, batch), want)


def test_a_gradient_of_parameters_alone_may_close_over_arrays():
    table = np.arange(1.0, D * D + 1, dtype=np.float32).reshape(D, D) / D

    @jax.custom_vjp
    def scaled(w):
        return w * 2

    scaled.defvjp(lambda w: (scaled(w), None), lambda _, g: (g * table,))

    def loss(params, batch):
        x = batch["x"]
        for i, w in enumerate(params):
            x = jnp.tanh((jp.stage_boundary(x) if i else x) @ scaled(w))
        return jnp.mean((x - batch["y"]) ** 2)

    params = [jax.random.normal(k, (D, D)) / 4 for k in jax.random.split(jax.random.key(0), 4)]
    for schedule in SCHEDULES[:2]:
        got = pipe(loss, schedule=schedule).value_and_grad(params, make_batch())
        assert_close(got, jax.value_and_grad(loss)(params, make_batch()))


def test_copies_of_a_pipeline_are_pipelines_of_their_own():
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss)
    want = f.value_and_grad(params, batch)
    pickled = pickle.dumps(jp.pipeline(mean_loss, schedule="1f1b", microbatches=M))
    whole = pickle.loads(pickled).replace(mesh=pipe_mesh(4))
    for again in (copy.copy(f), copy.deepcopy(f), whole):
        assert again.workers is not f.workers
        assert_equal(again.value_and_grad(params, batch), want)


def test_nans_flow_as_in_plain_jax():
    params, batch = make_params(), make_batch()
    batch["x"] = batch["x"].at[5, 2].set(jnp.nan)
    f = pipe(mean_loss, schedule="zb_h1")
    value, grads = f.value_and_grad(params, batch)
    want, plain = jax.value_and_grad(mean_loss, allow_int=True)(params, batch)
    assert np.isnan(value) and np.isnan(want)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        if theirs.dtype != jax.dtypes.float0:
            assert np.array_equal(np.isnan(ours), np.isnan(theirs))


def test_runs_and_schedules_of_equal_programs_are_bitwise_equal():
    params, batch = make_params(), make_batch()
    base = pipe(mean_loss, schedule="1f1b")
    first = base.value_and_grad(params, batch)
    assert_equal(base.value_and_grad(params, batch), first)
    assert_equal(base.replace(schedule="gpipe").value_and_grad(params, batch), first)
    split = base.replace(schedule="zb_h1").value_and_grad(params, batch)
    for own in (late_weights, backwards_from_the_last):
        assert_equal(base.replace(schedule=own).value_and_grad(params, batch), split)


def test_replace_changes_one_option_and_keeps_the_rest():
    f = pipe(with_aux, has_aux=True)
    g = f.replace(microbatches=4)
    assert g.options.has_aux and g.options.microbatches == 4 and f.options.microbatches == M
    params, batch = make_params(), make_batch()
    assert g(params, batch)[1]["rows"].shape == (4, ROWS // 4)
    with pytest.raises(jp.PipelineError, match="did you mean microbatches"):
        f.replace(microbatch=4)


def test_batches_of_another_shape_are_compiled_anew_and_neither_is_stale():
    params = make_params()
    f = pipe(mean_loss)
    for rows in (12, 6, 12, 18, 6):
        batch = make_batch(rows)
        want = jax.value_and_grad(mean_loss, allow_int=True)(params, batch)
        assert_close(f.value_and_grad(params, batch), want)


def test_arguments_are_never_donated_or_changed():
    params, batch = make_params(), make_batch()
    before = jax.tree.map(lambda a: np.array(a, copy=True), (params["layers"], batch))
    f = pipe(mean_loss)
    placed = f.place(params, batch)
    for given in (params, placed):
        f.value_and_grad(given, batch)
        f(given, batch)
        assert_equal(jax.tree.map(np.asarray, (given["layers"], batch)), before)


def test_memory_limit_recomputes_until_it_fits_or_names_the_numbers():
    params, batch = make_params(), make_batch(96)
    free = pipe(mean_loss).lower(params, batch)
    tight = pipe(mean_loss, residuals="recompute").lower(params, batch)
    least, most = (max(m.total for m in low.memory) for low in (tight, free))
    assert least < most
    fitted = pipe(mean_loss, memory_limit=least).lower(params, batch)
    assert max(m.total for m in fitted.memory) <= least
    with pytest.raises(jp.PipelineError, match=r"device \d needs .* more than memory_limit=100"):
        pipe(mean_loss, memory_limit=100).lower(params, batch)


def test_lower_takes_shapes_and_allocates_nothing(tmp_path):
    params, batch = make_params(), make_batch()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, batch))
    f = pipe(mean_loss)
    before = {id(a) for a in jax.live_arrays()}
    lowered = f.lower(*shapes)
    assert {id(a) for a in jax.live_arrays()} <= before
    table = str(lowered)
    assert "test_options.py:" in table
    assert lowered.schedule.devices == 4
    timeline = lowered.simulate()
    assert timeline.makespan > 0
    for ending, magic in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"step{ending}"
        lowered.save_timeline(path)
        assert path.read_bytes().startswith(magic)


def test_forward_only_schedule_serves_calls_and_refuses_gradients():
    schedule = jp.schedules.get("gpipe")(devices=4, microbatches=M).forward()
    params, batch = make_params(), make_batch()
    f = pipe(mean_loss, schedule=schedule)
    assert_close(f(params, batch), mean_loss(params, batch))
    assert f.lower(params, batch).schedule.forward_only
    with pytest.raises(jp.PipelineError, match="forward only"):
        f.value_and_grad(params, batch)
