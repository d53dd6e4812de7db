"""What cannot be cut is refused with the model's source line and a way out."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import capture
from jaxpipe.capture import stage_boundary
from jaxpipe.errors import PipelineError

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def inner(x):
    return stage_boundary(jnp.sin(x))  # the line that messages must name


LINE = inner.__code__.co_firstlineno + 1


@jax.custom_jvp
def with_rule(x):
    return inner(x)


with_rule.defjvp(lambda p, t: (inner(p[0]), t[0]))


@jax.custom_vjp
def with_vjp(x):
    return inner(x)


with_vjp.defvjp(lambda x: (inner(x), None), lambda _, g: (g,))

PLACES = {
    "jax.checkpoint": jax.checkpoint(inner),
    "lax.cond": lambda x: jax.lax.cond(x[0] > 0, inner, jnp.cos, x),
    "lax.while_loop": lambda x: jax.lax.while_loop(lambda c: c[0] > 1, inner, x),
    "a jax.custom_jvp function": with_rule,
    "a jax.custom_vjp function": with_vjp,
    "lax.scan": lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_boundary_where_the_model_cannot_be_cut_is_refused_with_its_line(place):
    f = PLACES[place]
    wrapped = jax.jit(lambda p, x: f(jax.jit(f)(p * x)).sum())
    with pytest.raises(PipelineError) as error:
        capture.trace(wrapped, (X, X))
    text = str(error.value)
    assert f"test_errors.py:{LINE} (inner)" in text
    assert f"inside {place}" in text and "To mend it" in text


def test_ordered_effects_are_refused_and_unordered_ones_are_kept_in_the_forward():
    def loss(p, x, ordered=False):
        y = stage_boundary(p * x)
        jax.debug.print("{}", y[0], ordered=ordered)
        return jnp.sum(y * y)

    with pytest.raises(PipelineError, match="ordered effect"):
        capture.trace(functools.partial(loss, ordered=True), (X, X))
    graph = capture.build(capture.trace(loss, (X, X)), [1, 1], seeds={0: 1.0})
    has_effects = {
        (st.index, kind): bool(spec.program.jaxpr.effects)
        for st in graph.stages
        for kind, spec in st.passes.items()
    }
    assert {k for k, v in has_effects.items() if v} == {(1, "F")}


def test_wrong_residuals_are_refused_with_the_choices():
    traced = capture.trace(lambda p, x: jnp.sum(stage_boundary(p * x)), (X, X))
    for wrong in ("mincut", ["vjp"], ["vjp", "all"]):
        with pytest.raises(PipelineError, match=re.escape("'min_cut', 'vjp', 'recompute'")):
            capture.build(traced, [1, 1], seeds={0: 1.0}, residuals=wrong)


def test_a_boundary_is_bitwise_an_identity_under_every_transformation():
    def f(x):
        return jnp.sum(stage_boundary({"a": jnp.sin(x)}, name="here")["a"] ** 2)

    def plain(x):
        return jnp.sum(jnp.sin(x) ** 2)

    x = jnp.linspace(0, 1, 12).reshape(3, 4)
    for t in (
        jax.jit,
        jax.grad,
        jax.vmap,
        jax.checkpoint,
        lambda g: jax.jit(jax.vmap(jax.grad(g))),
    ):
        assert jnp.array_equal(t(f)(x), t(plain)(x))
    assert stage_boundary(None) is None
    with pytest.raises(ValueError, match="2 specs but x has 3 leaves"):
        stage_boundary([x, x, x], sharding=[jax.P(), jax.P()])
