"""The same training without a pipeline: what the demo compares with.

One `jax.jit` program per step, on one device: a `lax.scan` over the microbatches that adds up the
gradients, then the optimizer. It is written without jaxpipe, so that equal losses mean something.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any, Any], jax.Array]


class PlainState(NamedTuple):
    """Parameters and optimizer state, on one device."""

    params: Any
    opt_state: Any


def loss_and_grads(loss: Loss, params: Any, batch: Any, *, microbatches: int) -> tuple[Any, Any]:
    """Mean loss and gradients over the microbatches, accumulated by a scan."""
    stacked = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def add(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, microbatch)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, stacked)
    return jax.tree.map(lambda x: x / microbatches, total)


def plain_step(
    loss: Loss, optimizer: optax.GradientTransformation, *, microbatches: int
) -> Callable[[PlainState, Any], tuple[PlainState, jax.Array]]:
    """A jitted training step ``(state, batch) -> (state, loss)`` that donates the state."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: PlainState, batch: Any) -> tuple[PlainState, jax.Array]:
        value, grads = loss_and_grads(loss, state.params, batch, microbatches=microbatches)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return PlainState(optax.apply_updates(state.params, updates), opt_state), value

    return step
