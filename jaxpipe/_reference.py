"""The same function without a pipeline: what a pipelined result is compared with.

One `lax.scan` over microbatches on one device, with the same cut of the batch, the same keys, seeds
and joining of outputs; weight gradients are added up in microbatch order. It can be called inside
other transformations. This file knows no stages, schedules or meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe._calls import (
    Call,
    Outputs,
    batch_axes,
    flat_function,
    microbatch_structs,
    read_outputs,
)
from jaxpipe._options import Options
from jaxpipe.capture.dtypes import accumulator_dtype
from jaxpipe.errors import PipelineError
from jaxpipe.lower.microbatch import Axes, fold, join


class Reference:
    """``loss_fn.reference``: `__call__` and `value_and_grad` as of the pipelined function.

    Both run one `jax.jit` program on the device of their arguments, and both can be traced. For a
    stage function of its own the pipelined result differs from this one by rounding only.
    """

    def __init__(self, fun: Callable, options: Options) -> None:
        self._fun = fun
        self._options = options
        self._jitted = jax.jit(self._run, static_argnames=("gradients", "has_key"))

    def __call__(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """Loss, ``(loss, aux)``, or joined outputs, as of the pipelined function."""
        value, _ = self._jitted(
            params, (args, kwargs), rng, gradients=False, has_key=rng is not None
        )
        return value

    def value_and_grad(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """``(loss, grads)`` or ``((loss, aux), grads)``.

        Integer, boolean and key leaves of ``params`` get float0 zeros.
        """
        if self._options.reduce == "concat":
            raise PipelineError('with reduce="concat" there is no loss to differentiate.')
        value, grads = self._jitted(
            params, (args, kwargs), rng, gradients=True, has_key=rng is not None
        )
        leaves, tree = jax.tree.flatten(params)
        found = iter(grads)
        full = [next(found) if is_trained(leaf) else float0_zeros(leaf) for leaf in leaves]
        return value, jax.tree.unflatten(tree, full)

    def _run(self, params: Any, batch: Any, rng: Any, *, gradients: bool, has_key: bool) -> Any:
        options, count = self._options, int(self._options.microbatches)
        leaves, tree = jax.tree.flatten(params)
        batch_leaves, batch_tree = jax.tree.flatten(batch)
        call = Call(leaves, tree, [*batch_leaves, *([rng] if has_key else [])], batch_tree, has_key)
        axes = batch_axes(options, call)
        whole = [jnp.asarray(leaf) for leaf in batch_leaves]
        blocks = _blocks(whole, axes, count)
        keys = jnp.stack(fold(rng, count)) if has_key else None
        fun = flat_function(self._fun, has_key)
        outputs = _outputs(options, fun, call, axes)

        def microbatch(leaves: list[Any], index_blocks: Any) -> list[Any]:
            cut, key = index_blocks
            pieces = iter(cut)
            merged = [whole[k] if axis is None else next(pieces) for k, axis in enumerate(axes)]
            args = [jax.tree.unflatten(tree, leaves), jax.tree.unflatten(batch_tree, merged)]
            return jax.tree.leaves(fun(*args, *([key] if has_key else [])))

        if not gradients:
            _, stacked = lax.scan(
                lambda carry, xs: (carry, microbatch(leaves, xs)), None, (blocks, keys), count
            )
            return outputs.assemble(_joined(outputs, stacked, count)), None
        return self._with_gradients(leaves, microbatch, (blocks, keys), outputs, count)

    def _with_gradients(
        self, leaves: list[Any], microbatch: Callable, xs: Any, outputs: Outputs, count: int
    ) -> Any:
        trained = [i for i, leaf in enumerate(leaves) if is_trained(leaf)]
        start = [jnp.asarray(leaves[i]) for i in trained]
        dtype = self._options.grad_dtype
        zeros = [jnp.zeros(a.shape, accumulator_dtype(a.dtype, dtype)) for a in start]
        (seed,) = outputs.seeds.values()

        def step(sums: list[Any], piece: Any) -> tuple[list[Any], list[Any]]:
            def differentiated(parts: list[Any]) -> tuple[Any, list[Any]]:
                full = list(leaves)
                for i, part in zip(trained, parts, strict=True):
                    full[i] = part
                results = microbatch(full, piece)
                return results[0], results

            loss, pull, results = jax.vjp(differentiated, start, has_aux=True)
            (grads,) = pull(jnp.asarray(seed, loss.dtype))
            return [s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)], results

        sums, stacked = lax.scan(step, zeros, xs, count)
        joined = _joined(outputs, stacked, count)
        if outputs.weighted:
            sums = [s / jnp.asarray(joined[1]).astype(s.dtype) for s in sums]
        return outputs.assemble(joined), sums


def is_trained(leaf: Any) -> bool:
    """Whether a parameter leaf gets a gradient: not integers, booleans and keys."""
    return jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)


def float0_zeros(leaf: Any) -> np.ndarray:
    """What `jax.grad` with ``allow_int=True`` gives for a leaf without gradient."""
    return np.zeros(np.shape(leaf), jax.dtypes.float0)


def _blocks(leaves: list[Any], axes: Axes, count: int) -> list[Any]:
    """The leaves that are cut, each with its microbatches along a new leading axis."""
    found = []
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is not None:
            shape = (*leaf.shape[:axis], count, leaf.shape[axis] // count, *leaf.shape[axis + 1 :])
            found.append(jnp.moveaxis(leaf.reshape(shape), axis, 0))
    return found


def _outputs(options: Options, fun: Callable, call: Call, axes: Axes) -> Outputs:
    args = microbatch_structs(call, axes, int(options.microbatches))
    shapes = jax.eval_shape(fun, *args)
    return read_outputs(options, jax.tree.structure(shapes), jax.tree.leaves(shapes))


def _joined(outputs: Outputs, stacked: list[Any], count: int) -> list[Any]:
    return [
        join(rule, [array[i] for i in range(count)])
        for rule, array in zip(outputs.rules, stacked, strict=True)
    ]
