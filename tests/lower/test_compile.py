"""Each distinct program is traced and lowered once, and compiled once for each of its devices."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import monitoring

import jaxpipe as jp
from jaxpipe.lower.jobs import _Functions
from tests.meshes import pipe_mesh

D, M = 16, 8
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_counts: dict[str, Counter] = {_LOWER: Counter(), _COMPILE: Counter()}


def _listen(event: str, _: float, **details) -> None:
    if event in _counts:
        _counts[event][details.get("fun_name", "").removeprefix("jit(").removesuffix(")")] += 1


monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def counts():
    """Lowerings and compilations from here on, by the name of the function."""
    for counter in _counts.values():
        counter.clear()
    return _counts


def decoder(params, batch):
    """Eight equal blocks; the first stage has an embedding before them and the last one a loss."""
    x = jnp.take(params["table"], batch["x"], axis=0)
    for i, w in enumerate(params["blocks"]):
        if i:
            x = jp.stage_boundary(x)
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def make():
    block = {"up": jnp.ones((D, D)), "down": jnp.ones((D, D))}
    params = {"table": jnp.ones((9, D)), "head": jnp.ones((D, D)), "blocks": [block] * 8}
    return params, {"x": jnp.zeros(M, jnp.int32), "y": jnp.zeros((M, D))}


@pytest.mark.parametrize(
    ("schedule", "kinds"), [("1f1b", "FB"), ("zb_h1", "FIW"), ("interleaved", "FB")]
)
def test_equal_stages_are_lowered_once_and_compiled_once_for_each_device(
    schedule, kinds, counts, monkeypatch
):
    traced = Counter()
    get = _Functions.get

    def counting(self, key, name, make):
        def made():
            fun = make()
            return lambda *args: (traced.update([name]), fun(*args))[1]

        return get(self, key, name, made)

    monkeypatch.setattr(_Functions, "get", counting)
    params, batch = make()
    f = jp.pipeline(decoder, schedule=schedule, microbatches=M, mesh=pipe_mesh(4))
    lowered = f.lower(params, batch)
    programs = {
        (spec.program.name, id(spec.program), lowered.schedule.placement[stage.index])
        for stage in lowered.stage_graph.stages
        for kind in kinds
        if (spec := stage.passes.get(kind)) is not None
    }
    assert len({each for name, each, _ in programs if name == "F"}) == 3  # first, middle, last
    f.value_and_grad(params, batch)
    for name in {name for name, _, _ in programs}:
        distinct = len({each for own, each, _ in programs if own == name})
        assert counts[_LOWER][name] == traced[name] == distinct, (name, counts[_LOWER])
        assert counts[_COMPILE][name] == len([own for own, _, _ in programs if own == name])
    for counter in counts.values():
        counter.clear()
    f.value_and_grad(params, batch)
    assert not counts[_LOWER] and not counts[_COMPILE]  # nothing is lowered or compiled again


def test_parts_of_an_update_that_are_equal_are_lowered_once(counts):
    params, batch = make()
    f = jp.pipeline(decoder, schedule="1f1b", microbatches=M, mesh=pipe_mesh(4))
    step = f.train_step(optax.adam(1e-3))
    state = step.init(params, batch)
    state, _ = step(state, batch)
    assert counts[_LOWER]["update_local"] <= 3 and counts[_COMPILE]["update_local"] == 4
    for counter in counts.values():
        counter.clear()
    step(state, batch)
    assert not counts[_LOWER] and not counts[_COMPILE]


def test_lowered_holds_one_program_for_equal_stages():
    params, batch = make()
    f = jp.pipeline(decoder, schedule="1f1b", microbatches=M, mesh=pipe_mesh(4))
    stages = f.lower(*jax.eval_shape(lambda: (params, batch))).stage_graph.stages
    for kind in "FB":
        assert stages[1].passes[kind].program is stages[2].passes[kind].program
        assert stages[0].passes[kind].program is not stages[1].passes[kind].program
