"""Helpers for the laws of updates: a tree on several devices, run whole and run divided."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.lower.update import ALL, UNKNOWN, UpdatePlan, plan_update, trace_update


def submeshes(devices: int) -> list[Mesh]:
    return [Mesh(np.array(d), ()) for d in jax.devices()[:devices]]


def make_params(seed: int = 0) -> dict[str, Any]:
    """Thirteen leaves, one of them a scalar, in five layers."""
    shapes = {
        "embed": {"table": (32, 16)},
        "block0": {"kernel": (16, 24), "bias": (24,), "scale": (24,)},
        "block1": {"kernel": (24, 24), "bias": (24,), "scale": (24,)},
        "block2": {"kernel": (24, 16), "bias": (16,), "gain": ()},
        "head": {"kernel": (16, 32), "bias": (32,), "taps": (3, 8, 4)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten([jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


LAYERS = ("embed", "block0", "block1", "block2", "head")


def layer_owners(params: dict[str, Any], devices: int) -> dict[str, Any]:
    """Layers in contiguous runs on the devices."""
    return {
        name: jax.tree.map(lambda _, i=i: i * devices // len(LAYERS), params[name])
        for i, name in enumerate(LAYERS)
    }


def optax_update(optimizer: optax.GradientTransformation) -> Any:
    """The update of a state ``{params, opt_state, step}`` metrics loss and norm."""

    def update(state, grads, aux):
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state, {"loss": aux, "grad_norm": optax.tree.norm(grads)}

    return update


def plan_for(update: Any, state: Any, grads: Any, aux: Any, devices: int, **options) -> UpdatePlan:
    """A plan in which parameters and gradients lie by layers, and all else is derived."""
    owners = [
        jax.tree.map(lambda _: UNKNOWN, state),
        layer_owners(grads, devices),
        jax.tree.map(lambda _: ALL, aux),
    ]
    owners[0]["params"] = layer_owners(state["params"], devices)
    traced = trace_update(update, state, grads, aux)
    return plan_update(traced, jax.tree.leaves(owners), submeshes(devices), **options)


def place_inputs(plan: UpdatePlan, leaves: list[Any], devices: int) -> list[Any]:
    """Fresh copies of the leaves where the plan wants them."""
    at = [NamedSharding(m, PartitionSpec()) for m in submeshes(devices)]

    def put(leaf: Any, device: int) -> jax.Array:
        return jax.device_put(leaf, at[device], may_alias=False)

    return [
        [put(leaf, d) for d in range(devices)] if owner == ALL else put(leaf, owner)
        for leaf, owner in zip(leaves, plan.owners, strict=True)
    ]


def one_copy(leaf: Any) -> Any:
    """The leaf; all copies of a leaf held by several devices must be equal, bit for bit."""
    if not isinstance(leaf, list | tuple):
        return leaf
    assert all(differences(leaf[0], copy) == {} for copy in leaf[1:])
    return leaf[0]


def run_whole(update: Any, state: Any, grads: list[Any], auxes: list[Any]) -> tuple[Any, list]:
    step = jax.jit(update)
    history = []
    for g, aux in zip(grads, auxes, strict=True):
        state, metrics = step(state, g, aux)
        history.append(metrics)
    return state, history


def run_divided(
    plan: UpdatePlan, state: Any, grads: list[Any], auxes: list[Any], devices: int, **options
) -> tuple[Any, list]:
    leaves, treedef = jax.tree.flatten(state)
    count = len(leaves)
    held = place_inputs(plan, [*leaves, *jax.tree.leaves((grads[0], auxes[0]))], devices)[:count]
    history = []
    for g, aux in zip(grads, auxes, strict=True):
        fresh = place_inputs(plan, [*leaves, *jax.tree.leaves((g, aux))], devices)[count:]
        out = plan([*held, *fresh], **options)
        held = out[:count]
        history.append(plan.metrics.unflatten(out[count:]))
    return treedef.unflatten([one_copy(leaf) for leaf in held]), history


def make_grads(params: Any, steps: int, *, scale: float = 1.0) -> list[Any]:
    leaves, treedef = jax.tree.flatten(params)
    out = []
    for i in range(steps):
        keys = jax.random.split(jax.random.key(100 + i), len(leaves))
        out.append(
            treedef.unflatten(
                [
                    scale * jax.random.normal(k, leaf.shape, leaf.dtype)
                    for k, leaf in zip(keys, leaves, strict=True)
                ]
            )
        )
    return out


def differences(a: Any, b: Any) -> dict[str, float]:
    """Leaves that are not bitwise equal, with their largest difference."""
    out = {}
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b), strict=True
    )
    for (path, x), (_, y) in pairs:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape, jax.tree_util.keystr(path)
        if not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            gap = np.max(np.abs(x.astype(np.float64) - y.astype(np.float64)))
            out[jax.tree_util.keystr(path)] = float(gap)
    return out


def initial_state(optimizer: optax.GradientTransformation, params: Any) -> dict[str, Any]:
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
    }
