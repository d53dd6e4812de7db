"""The fastest ways we know to do the same step without a pipeline, on one device.

*scan*: one `jax.jit` program with a `lax.scan` over the microbatches. *loop*: one jitted call for
each microbatch, which adds to donated gradients. XLA uses all cores for either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.demo.plain import Loss, loss_and_grads


def scan_form(loss: Loss, *, microbatches: int) -> Callable[[Any, Any], Any]:
    """``(params, batch) -> (loss, grads)`` in one program."""
    return jax.jit(
        lambda params, batch: loss_and_grads(loss, params, batch, microbatches=microbatches)
    )


def loop_form(loss: Loss, *, microbatches: int) -> Callable[[Any, Any], Any]:
    """``(params, batch) -> (loss, grads)`` by a call for each microbatch."""

    @jax.jit
    def cut(batch: Any) -> list[Any]:
        stacked = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(microbatches)]

    @jax.jit
    def first(params: Any, microbatch: Any) -> Any:
        return scaled(params, microbatch)

    @partial(jax.jit, donate_argnums=0)
    def add(total: Any, params: Any, microbatch: Any) -> Any:
        return jax.tree.map(jnp.add, total, scaled(params, microbatch))

    def scaled(params: Any, microbatch: Any) -> Any:
        return jax.value_and_grad(lambda p: loss(p, microbatch) / microbatches)(params)

    def step(params: Any, batch: Any) -> Any:
        head, *tail = cut(batch)
        total = first(params, head)
        for microbatch in tail:
            total = add(total, params, microbatch)
        return total

    return step
