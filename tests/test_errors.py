"""The words of every refusal that a user of `jaxpipe.pipeline` may meet; nothing has run then."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe as jp
from jaxpipe import F
from tests.meshes import pipe_mesh

D = 4


def loss(params, batch):
    x = batch["x"]
    for i, w in enumerate(params["layers"]):
        x = jnp.tanh((jp.stage_boundary(x) if i else x) @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def make(layers=4, rows=8):
    params = {"layers": [jnp.eye(D) for _ in range(layers)]}
    return params, {"x": jnp.ones((rows, D)), "y": jnp.zeros((rows, D))}


def pipe(fun=loss, *, devices=4, schedule="1f1b", microbatches=4, **options):
    options.setdefault("mesh", pipe_mesh(devices))
    return jp.pipeline(fun, schedule=schedule, microbatches=microbatches, **options)


def refusal(call, error=jp.PipelineError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def says(text, *words):
    for word in words:
        assert re.search(word, text), f"{word!r} is not in: {text}"


def test_too_few_segments_names_both_numbers_the_lines_and_the_remedy():
    text = refusal(lambda: pipe().value_and_grad(*make(layers=3)))
    says(text, r"\b3 segments", r"\b4 stages", r"test_errors\.py:\d+", "stage_boundary")


def test_explicit_stages_that_do_not_sum_to_the_segments():
    text = refusal(lambda: pipe(stages=[3, 2, 2, 1]).value_and_grad(*make(layers=4)))
    says(text, r"\b8\b", r"\b4\b", "stages")


def test_too_many_explicit_stages_for_the_schedule():
    text = refusal(lambda: pipe(stages=[1] * 8).value_and_grad(*make(layers=8)))
    says(text, r"\b8\b", r"\b4\b")


def test_microbatches_that_do_not_divide_the_batch_name_the_leaf_and_both_numbers():
    params, batch = make(rows=6)
    text = refusal(lambda: pipe().value_and_grad(params, batch))
    says(text, r"batch\['x'\]", r"size 6 along axis 0", r"\b4 microbatches")


def test_leaves_of_different_lengths_are_named():
    params, batch = make()
    batch["y"] = batch["y"][:4]
    text = refusal(lambda: pipe().value_and_grad(params, batch))
    says(text, r"batch\['x'\] has 8", r"batch\['y'\]", r"has 4 along axis 0")


def test_scalar_batch_leaf_without_axis():
    params, batch = make()
    batch["scale"] = 2.0
    text = refusal(lambda: pipe().value_and_grad(params, batch))
    says(text, r"batch\['scale'\]", "no axis 0", "None")


BACKWARD_TOO_EARLY = """\
0F0 0B0 0F1 0B1
1F0 1B0 1F1 1B1
2F0 2B0 2F1 2B1
3F1 3F0 3B0 3B1
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BACKWARD_TOO_EARLY, ["waits", "3F1", "device 3"]),
        ("0F0 0F1 0B0 0B1 0B1\n1F0 1F1 1B0 1B1\n", ["0B1", "device 0", "twice|again|2 times"]),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1B0\n", ["1B1|stage 1", "device 1", "missing|no B"]),
        ("0F0 0F1 0B0 0B1\n1F0 1F1 1I0 1W0 1I1\n", ["1W1", "missing|no W"]),
    ],
    ids=["deadlock", "repeated", "missing", "missing W"],
)
def test_wrong_schedules_are_refused_before_anything_runs(text, words):
    devices = len(text.splitlines())
    message = refusal(
        lambda: pipe(
            schedule=jp.Schedule.parse(text), devices=devices, microbatches=2
        ).value_and_grad(*make()),
        jp.ScheduleError,
    )
    says(message, *words)


def test_a_misplaced_stage_names_both_devices():
    message = refusal(
        lambda: jp.Schedule.parse("0F0 1F0 0B0\n1B0\n", placement=(0, 1)).check(), jp.ScheduleError
    )
    says(message, "1F0", "device 0", "device 1")


def test_a_schedule_function_that_misses_microbatches():
    @jp.schedule
    def lazy(device, devices, microbatches):
        for i in range(microbatches - 1):
            yield F(i)
            yield jp.B(i)

    message = refusal(lambda: pipe(schedule=lazy).value_and_grad(*make()), jp.ScheduleError)
    says(message, "missing|no F", r"0F3")


def test_unknown_schedule_names_the_nearest():
    message = refusal(lambda: pipe(schedule="1f1").value_and_grad(*make()), jp.ScheduleError)
    says(message, "1f1", "1f1b")


def test_schedules_of_other_sizes_name_both_numbers():
    made = jp.schedules.get("1f1b")(devices=2, microbatches=4)
    text = refusal(lambda: pipe(schedule=made).value_and_grad(*make()))
    says(text, "for 2 devices", "has 4", "make_mesh")
    made = jp.schedules.get("1f1b")(devices=4, microbatches=3)
    text = refusal(lambda: pipe(schedule=made).value_and_grad(*make()))
    says(text, "for 3 microbatches", "microbatches=4")


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (lambda p, b: loss(p, b) * jnp.ones(3), ["scalar", r"\(3,\)", "mean"]),
        (lambda p, b: (loss(p, b) > 0).astype(int), ["scalar|floating", "int32"]),
        (lambda p, b: (loss(p, b), 1.0), ["has_aux=True", 'reduce="weighted"']),
        (lambda p, b: {"loss": loss(p, b)}, ["scalar", "loss"]),
        (lambda p, b: None, ["scalar|None"]),
        (lambda p, b: "loss", ["str", "'loss'", "no array"]),
    ],
    ids=["vector", "integer", "pair", "dict", "None", "text"],
)
def test_a_loss_that_is_no_scalar_is_refused(fun, words):
    says(refusal(lambda: pipe(fun).value_and_grad(*make())), *words)


def in_checkpoint(f, x):
    return jax.checkpoint(f)(x)


def in_cond(f, x):
    return jax.lax.cond(x.sum() > 0, f, jnp.sin, x)


def in_while(f, x):
    return jax.lax.while_loop(lambda c: c.sum() > 1e9, f, x)


def in_custom_jvp(f, x):
    g = jax.custom_jvp(f)
    g.defjvp(lambda p, t: (f(*p), t[0]))
    return g(x)


def in_custom_vjp(f, x):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return g(x)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (in_checkpoint, "jax.checkpoint"),
        (in_cond, "cond"),
        (in_while, "while"),
        (in_custom_jvp, "custom_jvp"),
        (in_custom_vjp, "custom_vjp"),
    ],
)
def test_a_boundary_inside_another_transformation_names_it_and_its_line(place, name):
    def inner(x):
        return jp.stage_boundary(jnp.tanh(x))

    line = inner.__code__.co_firstlineno + 1

    def nested(params, batch):
        x = jp.stage_boundary(batch["x"] @ params["layers"][0])
        return jnp.mean(place(inner, x) ** 2)

    text = refusal(lambda: pipe(nested, devices=2).value_and_grad(*make()))
    says(text, re.escape(name), rf"test_errors\.py:{line}\b")


def test_a_pipelined_function_under_a_transformation_names_the_ways_out():
    f = pipe()
    params, batch = make()
    for call in (
        lambda: jax.jit(f)(params, batch),
        lambda: jax.grad(f)(params, batch),
        lambda: jax.jit(f.value_and_grad)(params, batch),
        lambda: jax.vmap(f, in_axes=(None, 0))(params, jax.tree.map(lambda a: a[None], batch)),
    ):
        says(refusal(call), r"\.value_and_grad", r"\.train_step", r"\.reference")
    jax.jit(f.reference)(params, batch)


def test_a_mesh_without_the_pipeline_axis_is_refused_at_once():
    text = refusal(lambda: pipe(mesh=pipe_mesh(4, axis="stage")))
    says(text, "no axis 'pipe'", "stage", r"axis=")


def test_parameters_of_another_tree_name_the_paths():
    f = pipe()
    params, batch = make()
    f.value_and_grad(params, batch)
    text = refusal(lambda: f.value_and_grad({**params, "extra": jnp.ones(2)}, batch))
    says(text, r"\['extra'\]", "not among them", "replace")
    text = refusal(lambda: f.place({"layers": params["layers"][:2]}))
    says(text, r"missing \['layers'\]\[2\]")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduce": "average"}, ["'average'", "'mean'"]),
        ({"microbatches": 0}, ["positive", "0"]),
        ({"microbatches": 2.5}, ["2.5"]),
        ({"stages": 4}, ["stages=4", r"\[3, 2, 2, 1\]"]),
        ({"residuals": "all"}, ["'all'", "min_cut"]),
        ({"dispatch": "ready"}, ["not there yet", "fixed"]),
        ({"has_state": True}, ["has_state=True", "not there yet"]),
        ({"mesh": "pipe"}, ["jax.sharding.Mesh"]),
        ({"schedule": 7}, ["'1f1b'"]),
        ({"grad_dtype": "int32"}, ["floating"]),
        ({"memory_limit": "16GB"}, ["bytes"]),
        ({"memory_limit": float("nan")}, ["positive", "nan"]),
        ({"memory_limit": 0}, ["positive", "0"]),
        ({"stages": 3.5}, ["stages=3.5"]),
        ({"stages": []}, [r"stages=\[\]", "positive"]),
        ({"residuals": None}, ["residuals=None", "min_cut"]),
        ({"residuals": ["vjp", 3]}, ["3 is none of"]),
        ({"grad_dtype": "complex64"}, ["floating"]),
        ({"microbatches": True}, ["positive", "True"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_options_are_looked_at_when_given(options, words):
    says(refusal(lambda: pipe(**options)), *words)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("model"), ["'model'", "no axis", r"\['data'\]"]),
        (P("pipe"), ["'pipe'", "pipeline's axis"]),
        (P(None, None, "data"), ["3 entries", "2 dimensions"]),
        (P("data", "data"), ["'data' twice"]),
        ("data", ["no jax.sharding.PartitionSpec"]),
        ({"layers": [P(("data",), None)] * 3 + [P("data")], "odd": P("data")}, ["size 3", "2 dev"]),
    ],
)
def test_a_layout_that_the_mesh_cannot_have_names_the_leaf(spec, words):
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, batch = make()
    params["odd"] = jnp.ones(3)
    text = refusal(
        lambda: pipe(mesh=mesh, devices=2, param_specs=spec).value_and_grad(params, batch)
    )
    says(text, r"params\['(layers|odd)'\]", *words)


def test_float64_sums_without_x64_are_refused():
    text = refusal(lambda: pipe(grad_dtype="float64").value_and_grad(*make()))
    says(text, "float64", "float32", "jax_enable_x64")


def test_a_boundary_whose_result_is_not_used_is_told_from_none():
    def forgotten(params, batch):
        x = batch["x"]
        for w in params["layers"]:
            jp.stage_boundary(x)
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    text = refusal(lambda: pipe(forgotten).value_and_grad(*make()))
    says(text, "1 segment", "4 more marks", r"test_errors\.py:\d+", r"x = jaxpipe\.stage_boundary")


def test_many_microbatches_are_compared_with_the_batch_before_a_schedule_is_made():
    says(refusal(lambda: pipe(microbatches=10**9).value_and_grad(*make())), "size 8", "1000000000")


def test_lists_of_numbers_are_told_to_be_arrays():
    params, batch = make()
    text = refusal(lambda: pipe().value_and_grad(params, jax.tree.map(lambda a: a.tolist(), batch)))
    says(text, r"batch\['x'\]\[0\]\[0\]", "one array")


def test_a_method_is_refused_with_the_way_to_pipeline_it():
    class Trainer:
        def loss(self, params, batch):
            return loss(params, batch)

    says(refusal(lambda: pipe(Trainer.loss)), "Trainer.loss takes self", r"self\.loss = ")
    params, batch = make()
    assert pipe(Trainer().loss)(params, batch) == pipe()(params, batch)


def test_attributes_of_the_function_do_not_reach_the_pipeline():
    def own(params, batch):
        return loss(params, batch)

    own.mesh = own.options = own.workers = "mine"
    assert pipe(own)(*make()) == pipe()(*make())


def test_tracing_is_noticed_where_no_argument_is_traced():
    f = pipe()
    params, batch = make()
    says(refusal(lambda: jax.jit(lambda x: f(params, batch) + x)(1.0)), "inside jax.jit")


def test_without_jit_there_is_no_pipeline():
    with jax.disable_jit():
        says(refusal(lambda: pipe()(*make())), "jax_disable_jit", r"\.reference")


def test_trees_cannot_be_placed_or_gathered_inside_a_transformation():
    import optax

    f = pipe()
    params, batch = make()
    f.lower(params, batch)
    for call in (f.place, f.gather, f.train_step(optax.sgd(0.1)).init):
        says(refusal(lambda call=call: jax.jit(call)(params)), "inside jax.jit")


def test_shapes_alone_are_not_run():
    import optax

    f = pipe()
    params, batch = make()
    shapes = jax.eval_shape(lambda: params)
    f.lower(shapes, batch)
    for call in (
        lambda: f(shapes, batch),
        lambda: f.value_and_grad(shapes, batch),
        lambda: f.place(shapes),
        lambda: f.train_step(optax.sgd(0.1)).init(shapes),
    ):
        says(refusal(call), r"params\['layers'\]\[0\] is a jax.ShapeDtypeStruct", r"\.lower")


def test_an_update_that_fails_or_moves_arrays_says_where():
    import optax

    def failing(state, grads, aux):
        def check(_):
            raise ValueError("not today")

        jax.debug.callback(check, grads["layers"][2])
        return state, {}

    def moving(state, grads, aux):
        layers = state.params["layers"]
        return state.replace(params={"layers": layers[::-1]}), {}

    f = pipe()
    params, batch = make()
    for update, words in (
        (failing, ["Device 2 failed in the optimizer's update", "not today", "donate=False"]),
        (moving, ["device 3", r"state\.params\['layers'\]\[0\]", "device 0", "scalars"]),
    ):
        step = f.train_step(update)
        state = step.init(params, batch)
        says(refusal(lambda step=step, state=state: step(state, batch)), *words)
    adam, sgd = f.train_step(optax.adam(0.1)), f.train_step(optax.sgd(0.1))
    text = refusal(lambda: adam(sgd.init(params, batch), batch))
    says(text, "state.opt_state is not of this optimizer", "ScaleByAdamState")


def test_deleted_arrays_are_named():
    f = pipe()
    params, batch = make()
    params["layers"][2].delete()
    says(refusal(lambda: f(params, batch)), r"params\['layers'\]\[2\]", "deleted")
    params, batch = make()
    batch["y"].delete()
    says(refusal(lambda: f(params, batch)), r"batch\['y'\]", "deleted")
    says(refusal(lambda: f.gather(batch)), r"tree\['y'\]", "deleted")


def test_debug_nans_names_the_action_that_made_the_first_one():
    f = pipe()
    params, batch = make()
    params["layers"][1] = params["layers"][1].at[0, 0].set(jnp.nan)
    f(params, batch)
    with jax.debug_nans(True):
        text = refusal(lambda: f.value_and_grad(params, batch))
    says(text, "Device 1 failed at 1F0", "nan in its results")
    assert jnp.isnan(f(params, batch))


def test_an_error_in_a_callback_is_told_without_the_frames_below_it():
    def failing(params, batch):
        def check(x):
            raise ValueError("too large\nby 3")

        jax.debug.callback(check, batch["x"])
        return loss(params, batch)

    text = refusal(lambda: pipe(failing)(*make()))
    says(text, r"failed at \dF\d", "ValueError: too large\nby 3")
    assert "File " not in text


def test_residuals_list_of_another_length_names_both_numbers():
    text = refusal(lambda: pipe(residuals=["vjp"] * 3).value_and_grad(*make()))
    says(text, r"\b3\b", r"\b4\b", "residuals")


def test_a_leaf_that_is_no_array_is_named():
    params, batch = make()
    text = refusal(lambda: pipe().value_and_grad({**params, "name": "x"}, batch))
    says(text, "str", "'x'", "no array")


def test_a_key_that_is_no_key():
    params, batch = make()
    text = refusal(lambda: pipe().value_and_grad(params, batch, rng=jnp.ones(3)))
    says(text, "rng", "jax.random.key", "float32")


def test_a_training_step_says_what_it_takes():
    f = pipe()
    params, batch = make()
    says(refusal(lambda: f.train_step(0.1)), "optax", r"update\(state, grads, aux\)")
    import optax

    step = f.train_step(optax.sgd(0.1))
    says(refusal(lambda: step(params, batch)), "TrainState", r"step\.init\(params\)")
    says(
        refusal(lambda: f.train_step(optax.adam)), "adam makes an optimizer", r"optax\.adam\(1e-3\)"
    )
    says(refusal(lambda: f.train_step(lambda state: state)), "three arguments")
    state = step.init(params, batch)
    step(state, batch)
    says(
        refusal(lambda: step(state, batch)), r"state\.params", "state that it returned", "donate=F"
    )


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda g, s, p=None, **_: None, [r"\(updates, state\)", "None"]),
        (lambda g, s, p=None, **_: ({"w": 1.0}, s), ["another structure", "'w'"]),
        (
            lambda g, s, p=None, *, value_fn, **_: (g, s),
            ["value_fn", "as value", "update function"],
        ),
    ],
    ids=["None", "another tree", "asks for more"],
)
def test_optimizers_that_cannot_work_are_told(update, words):
    import optax

    optimizer = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    step = pipe().train_step(optimizer)
    params, batch = make()
    says(refusal(lambda: step(step.init(params), batch)), *words)


def test_failing_calls_leave_the_pipeline_usable():
    f = pipe()
    params, batch = make()
    value = f.value_and_grad(params, batch)[0]
    refusal(lambda: f.value_and_grad(params, {**batch, "x": batch["x"][:6]}))
    assert f.value_and_grad(params, batch)[0] == value
