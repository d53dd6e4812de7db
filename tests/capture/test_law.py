"""The programs that capture makes compute what plain JAX computes, whatever the model's shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpipe import capture
from jaxpipe.capture import stage_boundary as cut_here
from tests.capture.interpret import run

KEY = jax.random.key(0)


def assert_close(got, want, path=""):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, path
    scale = np.max(np.abs(want), initial=0)
    assert np.all(np.abs(got - want) <= 1e-4 * scale + 1e-7), path
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want) + 1e-7, path


def check(loss, params, batches, *, stages=None, groups=None, has_aux=False, **options):
    """Compare with jax.value_and_grad for B, and for I and W, on every residuals mode."""
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batches[0]))
    traced = capture.trace(loss, avals)
    groups = groups or [1] * len(traced.segments)
    flat_params = jax.tree.leaves(params)
    is_float = [jnp.issubdtype(p.dtype, jnp.inexact) for p in flat_params]
    plain = jax.jit(jax.value_and_grad(loss, has_aux=has_aux, allow_int=True))
    want = [plain(params, b) for b in batches]
    want_grads = [jax.tree.leaves(g) for _, g in want]
    graphs = {}
    for residuals in ("min_cut", "vjp", "recompute"):
        graph = capture.build(traced, groups, seeds={0: 1.0}, residuals=residuals, **options)
        graphs[residuals] = graph
        whole = ((), tuple(range(len(groups))))
        for split in whole if residuals == "min_cut" else (tuple(range(0, len(groups), 2)),):
            outs, grads = run(
                graph, flat_params, [jax.tree.leaves(b) for b in batches], split=split
            )
            for (value, _), out in zip(want, outs, strict=True):
                for a, b in zip(jax.tree.leaves(value), out, strict=True):
                    assert_close(b, a)
            for i, path in enumerate(traced.param_paths):
                if is_float[i]:
                    assert_close(grads[i], sum(g[i] for g in want_grads), path)
    return traced, graphs


def dense(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[0])


def mlp_params(n, d=8):
    keys = jax.random.split(KEY, n)
    return [{"w": dense(k, d, d), "b": dense(k, d)} for k in keys]


def data(n=2, b=4, d=8):
    return [
        {"x": dense(jax.random.key(i), b, d), "y": dense(jax.random.key(i + 9), b, d)}
        for i in range(n)
    ]


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def test_chain_equals_reference():
    def loss(params, batch):
        x = batch["x"]
        for i, p in enumerate(params):
            x = layer(p, cut_here(x) if i else x)
        return jnp.mean((x - batch["y"]) ** 2)

    _, graphs = check(loss, mlp_params(4), data())
    assert graphs["min_cut"].graph.edges == ((0, 1), (1, 2), (2, 3))


def test_skip_connections_go_straight_to_their_reader():
    def loss(params, batch):
        x = batch["x"]
        skips = []
        for p in params[:2]:
            x = layer(p, x)
            skips.append(x)
            x = cut_here(x)
        for p in params[2:]:
            x = cut_here(layer(p, x + skips.pop()))
        return jnp.mean((x - batch["y"]) ** 2)

    _, graphs = check(loss, mlp_params(4), data())
    assert graphs["min_cut"].graph.edges == ((0, 1), (0, 3), (1, 2), (2, 3), (3, 4))


def test_two_towers_are_independent_where_each_marks_its_input():
    def loss(params, batch):
        a, b = cut_here(batch["x"]), batch["y"]
        a = layer(params[0], a)
        b = layer(params[1], cut_here(b))
        x = cut_here((a, b))
        return jnp.mean((layer(params[2], x[0]) * layer(params[3], x[1])) ** 2)

    _, graphs = check(loss, mlp_params(4), data())
    graph = graphs["min_cut"].graph
    assert graph.edges == ((1, 3), (2, 3))
    assert (0, "F") in graph.empty


def test_tied_leaf_gets_gradients_from_each_stage():
    def loss(params, batch):
        x = batch["x"] @ params[0]["w"]
        x = layer(params[1], cut_here(x))
        x = layer(params[0], cut_here(x))
        return jnp.mean((cut_here(x) @ params[0]["w"].T - batch["y"]) ** 2)

    _, graphs = check(loss, mlp_params(2), data())
    users = [st.index for st in graphs["min_cut"].stages if 1 in st.params]
    assert users == [0, 2, 3]


def test_batch_leaves_reach_late_stages_and_outputs_come_from_any_stage():
    def loss(params, batch):
        x = layer(params[0], batch["x"])
        early = jnp.sum(x, axis=1)
        x = cut_here(x)
        x = layer(params[1], x) * (batch["y"] > 0)  # a mask of batch leaves only
        middle = {"mean": x.mean(), "batch": batch["x"][0], "constant": jnp.float32(3.0)}
        x = layer(params[2], cut_here(x))
        return jnp.mean((x - batch["y"]) ** 2), (early, middle, params[0]["b"])

    check(loss, mlp_params(3), data(), has_aux=True)


def test_stages_without_parameters_and_loss_only_stages():
    def loss(params, batch):
        x = cut_here(layer(params[0], batch["x"]))
        x = cut_here(jnp.sin(x))
        x = cut_here(cut_here(layer(params[1], x)))
        return jnp.mean((x - batch["y"]) ** 2)

    _, graphs = check(loss, mlp_params(2), data())
    graph = graphs["min_cut"].graph
    assert {(1, "W"), (4, "W"), (3, "F"), (3, "I"), (3, "W")} <= graph.empty
    assert (0, "I") in graph.empty


def test_values_without_gradient_are_symbolic_zeros():
    def loss(params, batch):
        x = layer(params[0], batch["x"])
        frozen = jax.lax.stop_gradient(x)
        index = jnp.argsort(x[:, 0])
        x, frozen, index, raw = cut_here((x, frozen, index, batch["y"]))
        x = layer(params[1], x) + frozen
        x = cut_here(x[index] + jax.lax.stop_gradient(layer(params[2], x)))
        return jnp.mean((x - raw) ** 2)

    _, graphs = check(loss, mlp_params(3), data())
    assert all("cotangent" not in v.name or v.nbytes == 4 * 8 * 4
               for v in graphs["min_cut"].graph.values)  # fmt: skip


def test_integer_bool_and_none_leaves_are_legal():
    params = {"a": mlp_params(1)[0], "table": jnp.arange(4), "flag": jnp.array(True), "none": None}

    def loss(params, batch):
        x = layer(params["a"], batch["x"])[params["table"]]
        x = cut_here(x)
        x = jnp.where(params["flag"], x, -x) + params["table"][:, None]
        return jnp.mean((x - batch["y"]) ** 2)

    check(loss, params, data())


def test_prologue_runs_parameter_only_work_once_and_its_gradient_is_exact():
    params = {"w": [dense(k, 8, 8) for k in jax.random.split(KEY, 2)], "a": dense(KEY, 8, 2),
              "b": dense(KEY, 2, 8), "g": dense(KEY, 8)}  # fmt: skip

    def loss(params, batch):
        merged = params["w"][0] + 0.5 * params["a"] @ params["b"]
        x = cut_here(jnp.tanh(batch["x"] @ merged))
        v = params["w"][1]
        normed = params["g"] * v / jnp.linalg.norm(v, axis=0)
        x = jnp.tanh(x @ normed + params["g"])
        return jnp.mean((x - batch["y"]) ** 2)

    _, graphs = check(loss, params, data(3))
    stages = graphs["min_cut"].stages
    for st in stages:
        names = [e.primitive.name for e in st.passes["F"].program.jaxpr.jaxpr.eqns]
        assert st.prologue is not None and names.count("dot_general") == 1


def test_bfloat16_casts_are_in_the_prologue_and_accumulate_in_float32():
    params = mlp_params(2)

    def loss(params, batch):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = batch["x"].astype(jnp.bfloat16)
        x = cut_here(layer(half[0], x))
        x = layer(half[1], x).astype(jnp.float32)
        return jnp.mean((x - batch["y"]) ** 2)

    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, data()[0]))
    traced = capture.trace(loss, avals)
    graph = capture.build(traced, [1, 1], seeds={0: 1.0})
    for st in graph.stages:
        assert {e.primitive.name for e in st.prologue.jaxpr.jaxpr.eqns} == {"convert_element_type"}
        assert st.epilogue is None  # the casts' transpose is the accumulation itself
        assert {a.dtype for a in st.accumulator_avals} == {jnp.dtype("float32")}
    batches = data(4)
    flat = jax.tree.leaves(params)
    _, grads = run(graph, flat, [jax.tree.leaves(b) for b in batches], split=(1,))
    want = [jax.tree.leaves(jax.grad(loss)(params, b)) for b in batches]
    for i, g in enumerate(grads):
        np.testing.assert_allclose(g, sum(w[i] for w in want), rtol=0.05, atol=2e-3)


def test_user_checkpoint_stays_in_the_backward():
    def block(p, x):
        return jnp.sin(layer(p, jnp.sin(x @ p["w"])))

    def make(wrap):
        def loss(params, batch):
            x = batch["x"]
            for i, p in enumerate(params):
                x = wrap(block)(p, cut_here(x) if i else x)
            return jnp.mean((x - batch["y"]) ** 2)

        return loss

    params = mlp_params(2)
    check(make(jax.checkpoint), params, data())
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, data()[0]))
    plain, kept = (
        capture.build(capture.trace(make(w), avals), [1, 1], seeds={0: 1.0}, residuals="vjp")
        for w in (lambda f: f, jax.checkpoint)
    )
    assert kept.stages[1].residual_nbytes < plain.stages[1].residual_nbytes / 2

    def matmuls(graph, kind):
        eqns = graph.stages[1].passes[kind].program.jaxpr.jaxpr.eqns
        return sum(e.primitive.name == "dot_general" for e in eqns)

    assert matmuls(kept, "F") == matmuls(plain, "F") == 2
    assert matmuls(kept, "B") > matmuls(plain, "B")
    # No matrix product is computed twice by I and W together.
    assert matmuls(kept, "I") + matmuls(kept, "W") == matmuls(kept, "B")


def test_no_row_loses_its_gradient_when_a_maximum_is_taken():
    params = mlp_params(2, d=64)

    def loss(params, batch):
        x = cut_here(layer(params[0], batch["x"]))
        x = jnp.exp(layer(params[1], x) * 3)
        return jnp.mean(jnp.max(x, axis=1) * batch["y"][:, 0])

    check(loss, params, data(b=128, d=64))


def test_custom_derivatives_conditionals_and_loops_inside_a_stage():
    @jax.custom_vjp
    def clip_grad(x):
        return x

    clip_grad.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @jax.custom_jvp
    def soft(x):
        return jnp.log1p(jnp.exp(x))

    soft.defjvp(lambda p, t: (soft(p[0]), t[0] * jax.nn.sigmoid(p[0])))

    def loss(params, batch):
        x = clip_grad(layer(params[0], batch["x"]))
        x = cut_here(soft(x))
        x = jax.lax.cond(batch["y"][0, 0] > 0, lambda x: layer(params[1], x), jnp.cos, x)
        x = cut_here(x)
        x, _ = jax.lax.scan(lambda c, _: (layer(params[2], c), c.sum()), x, None, length=3)
        x = cut_here(x)
        x = jax.lax.fori_loop(0, 2, lambda i, c: jnp.sin(c), x)
        return jnp.mean((x - batch["y"]) ** 2)

    check(loss, mlp_params(3), data())


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
        h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(16)(nn.Dropout(0.3)(h, deterministic=deterministic))


class Decoder(nn.Module):
    layers: int = 4

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        x = nn.Embed(11, 16, name="embed")(tokens)
        for i in range(self.layers):
            x = Block()(cut_here(x, name=f"block {i}") if i else x, deterministic)
        return nn.Embed(11, 16, name="embed2").attend(nn.LayerNorm()(x))


def decoder_loss(model, params, batch, key=None):
    extra = {} if key is None else {"rngs": {"dropout": key}}
    logits = model.apply(params, batch["x"], key is None, **extra)
    return -jnp.mean(jnp.take_along_axis(nn.log_softmax(logits), batch["y"][..., None], -1))


def tokens(n=2):
    return [
        {k: jax.random.randint(jax.random.fold_in(KEY, 2 * i + j), (2, 6), 0, 11)
         for j, k in enumerate("xy")}
        for i in range(n)
    ]  # fmt: skip


def test_flax_decoder_equals_reference_and_equal_stages_share_programs():
    model = Decoder()
    params = model.init(KEY, tokens()[0]["x"])
    _, graphs = check(lambda p, b: decoder_loss(model, p, b), params, tokens(), groups=[1, 1, 1, 1])
    for graph in graphs.values():
        first, second, third = graph.stages[0], graph.stages[1], graph.stages[2]
        assert all(second.passes[k].program is third.passes[k].program for k in "FBIW")
        assert first.passes["F"].program is not second.passes["F"].program


def test_dropout_draws_the_same_bits_in_forward_and_backward():
    model = Decoder()
    params = model.init(KEY, tokens()[0]["x"])
    batches = [{"b": b, "key": jax.random.key(i)} for i, b in enumerate(tokens())]
    check(lambda p, b: decoder_loss(model, p, b["b"], b["key"]), params, batches)


@pytest.mark.parametrize("groups", [[4], [1, 3], [2, 2], [3, 1]])
def test_any_grouping_of_segments_equals_reference(groups):
    model = Decoder()
    params = model.init(KEY, tokens()[0]["x"])
    check(lambda p, b: decoder_loss(model, p, b), params, tokens(1), groups=groups)
