"""Measures that look inside a lowered pipeline: host cost, residual bytes, time to build.

What they read (`Lowered.stage_graph` and `Lowered.schedule`) is described in
`jaxpipe.capture.ir`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from paired import seconds

import jaxpipe as jp

ELEMENTS = 8


def host_seconds_per_action(pipelined: Callable[[Any], Any], *, turns: int = 100) -> float:
    """(step - sum of the bare compiled calls) / actions, medians over ``turns``.

    The model is a chain of one multiplication and one tanh per stage, on 8 elements. A bare call
    is a jitted program of a pass, called alone until its results are ready.
    """
    stages = 4

    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:  # batch: (1, ELEMENTS)
        x = batch
        for number, weight in enumerate(params):
            if number:
                x = jp.stage_boundary(x)
            x = jnp.tanh(x * weight)
        return x.sum()

    params = [jnp.full((ELEMENTS,), 0.5) for _ in range(stages)]
    loss_fn = pipelined(loss)
    batch = jnp.ones((loss_fn.options.microbatches, ELEMENTS))
    lowered = loss_fn.lower(params, batch)
    placed = loss_fn.place(params, batch)
    jax.block_until_ready(loss_fn.value_and_grad(placed, batch))  # compile

    @cache
    def bare_seconds(stage: int, kind: str) -> float:
        spec = lowered.stage_graph.stages[stage].passes.get(kind)
        if spec is None:
            return 0.0
        # The same number of arguments and results as in a step, donation aside.
        fun = jax.jit(jaxpr_as_fun(spec.program.jaxpr))
        args = [jnp.ones(aval.shape, aval.dtype) for aval in spec.program.jaxpr.in_avals]
        jax.block_until_ready(fun(*args))
        return statistics.median(seconds(lambda: fun(*args)) for _ in range(turns))

    bare, count = 0.0, 0
    for action in lowered.schedule.actions():
        bare += bare_seconds(action.stage, action.kind)
        count += 1
    step = statistics.median(
        seconds(lambda: loss_fn.value_and_grad(placed, batch)) for _ in range(turns)
    )
    return (step - bare) / count


def residual_bytes(lowered: Any) -> tuple[int, int]:
    """Bytes saved from F to B by all stages for one microbatch, and those that `jax.vjp` saves."""
    stages = lowered.stage_graph.stages
    return sum(s.residual_nbytes for s in stages), sum(s.vjp_residual_nbytes for s in stages)


class _Reached(Exception):
    """XLA was about to be called."""


def build_seconds(loss_fn: Any, params: Any, batch: Any) -> float:
    """Seconds to trace, cut, differentiate, plan, and lower every distinct program.

    The clock stops where the first program is handed to XLA, which is after all are lowered.
    """

    def stop(*args: Any, **options: Any) -> Any:
        raise _Reached

    begun = time.perf_counter()
    with mock.patch.object(jax.stages.Lowered, "compile", stop):
        try:
            loss_fn.value_and_grad(params, batch)
        except _Reached:
            return time.perf_counter() - begun
    raise RuntimeError("nothing was compiled: was this call made before?")
