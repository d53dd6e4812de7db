"""One step of a compiled pipeline: arguments to their devices, the engine, results back.

Parameters may come placed or not, leaf by leaf; gradients and results go back in kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpipe._build import Built, Compiled
from jaxpipe._calls import Call
from jaxpipe._reference import float0_zeros, is_trained
from jaxpipe.capture.dtypes import accumulator_dtype
from jaxpipe.lower.place import Layout, is_placed, place_leaf

Results = dict[int, jax.Array]


def bring(layout: Layout, call: Call, *, copy: bool = False) -> tuple[list[jax.Array], list[bool]]:
    """Parameters on their devices, and which of them already were there.

    ``copy``: those that were not share no buffer with what was given.
    """
    kept = [is_placed(layout, i, leaf) for i, leaf in enumerate(call.params)]
    placed = [
        leaf if there else place_leaf(layout, i, leaf, copy=copy)
        for i, (leaf, there) in enumerate(zip(call.params, kept, strict=True))
    ]
    return placed, kept


def forward(compiled: Compiled, placed: Sequence[jax.Array], batch: Sequence[Any]) -> Results:
    """Run the forwards; joined outputs by number, each on the device that made it."""
    engine = compiled.engine
    engine.refuse_reentry()
    with engine.lock:
        try:
            engine.load(placed, batch)
            engine.run()
            return engine.results()
        finally:
            engine.clear()


def gradients(
    compiled: Compiled, placed: Sequence[jax.Array], batch: Sequence[Any]
) -> tuple[Results, list[Any]]:
    """Run a whole step; joined outputs, and one gradient per leaf on its home device.

    A leaf that gets no gradient (integers, keys) has None.
    """
    engine, built = compiled.engine, compiled.built
    layout = built.layout
    engine.refuse_reentry()
    with engine.lock:
        try:
            engine.load(placed, batch)
            if built.outputs.weighted:
                engine.run(
                    lambda: [jax.device_put(engine.results()[1], at) for at in layout.replicated]
                )
            else:
                engine.run()
            results, parts = engine.results(), engine.gradients()
        finally:
            engine.clear()
    dtype = built.options.grad_dtype
    return results, [
        _summed(layout, i, parts.get(i, ()), leaf, dtype) if is_trained(leaf) else None
        for i, leaf in enumerate(placed)
    ]


def _summed(
    layout: Layout,
    leaf: int,
    parts: Sequence[tuple[int, int, jax.Array]],
    param: jax.Array,
    grad_dtype: Any,
) -> jax.Array:
    """One gradient of a leaf on its home device: contributions added in order of stages."""
    home = layout.owners[leaf][0]
    sharding = layout.local[home][leaf]
    if not parts:
        dtype = accumulator_dtype(param.dtype, grad_dtype)
        return jnp.zeros(param.shape, dtype, device=sharding)
    total: Any = None
    for _, device, part in parts:
        here = part if device == home else jax.device_put(part, sharding)
        total = here if total is None else total + here
    return total


def grads_as_given(
    layout: Layout, call: Call, grads: Sequence[Any], kept: Sequence[bool]
) -> list[Any]:
    """Gradients where their parameters were given; float0 zeros for leaves without one."""
    leaves: list[Any] = []
    for i, (leaf, grad) in enumerate(zip(call.params, grads, strict=True)):
        if grad is None:
            leaves.append(float0_zeros(leaf))
        else:
            leaves.append(_moved(grad, layout.shardings[i] if kept[i] else _own_sharding(leaf)))
    return leaves


def outcome(built: Built, results: Results, call: Call, kept: Sequence[bool]) -> Any:
    """The caller's value of joined results.

    Replicated over the mesh, or, where no parameter is placed, on the parameters' own device.
    """
    ordered = [results[number] for number in range(len(built.outputs.rules))]
    return built.outputs.assemble(jax.device_put(ordered, _results_sharding(built, call, kept)))


def _results_sharding(built: Built, call: Call, kept: Sequence[bool]) -> Any:
    if any(kept) or not call.params:
        return built.layout.everywhere
    sharding = _own_sharding(call.params[0])
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if len(sharding.device_set) == 1:
        return SingleDeviceSharding(next(iter(sharding.device_set)))
    return built.layout.everywhere


def _own_sharding(leaf: Any) -> Any:
    """Where an unplaced parameter is; numpy arrays and numbers count as on the default device."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding
    return SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))


def _moved(array: jax.Array, sharding: Any) -> jax.Array:
    return array if array.sharding == sharding else jax.device_put(array, sharding)
