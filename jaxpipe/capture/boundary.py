"""`stage_boundary`: the mark a user puts where the model may be cut into stages.

It is an identity primitive on the flat leaves of a pytree. Under every JAX transformation it stays
bitwise an identity; under differentiation the tangents pass beside it, so a boundary in a function
that is differentiated, vectorised or jitted without jaxpipe costs nothing. Cutting at the marks is
`cut.py`'s work.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")

stage_boundary_p = jex.Primitive("stage_boundary")
stage_boundary_p.multiple_results = True


def stage_boundary(x: T, *, name: str | None = None, sharding: Any = None) -> T:
    """Mark a place where the model may be cut into pipeline stages; returns ``x`` unchanged.

    Args:
      x: the value, or any pytree of arrays, that flows on to the next segment; shapes and dtypes
        are free and may differ from boundary to boundary.
      name: a name for the boundary in tables and messages.
      sharding: a `jax.sharding.PartitionSpec` (or a pytree prefix of them), the layout in which
        the value crosses to the next device's submesh.

    Without `jaxpipe.pipeline` it does nothing. Inside `jax.checkpoint`, `lax.cond`,
    `lax.while_loop`, custom derivative functions or `shard_map` the pipeline refuses it, with its
    source line.

    >>> import jax.numpy as jnp
    >>> float(jax.grad(lambda x: stage_boundary(x * x))(3.0))
    6.0
    """
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        return x
    specs = None
    if sharding is not None:
        is_spec = lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec)  # noqa: E731
        flat = jax.tree.leaves(sharding, is_leaf=is_spec)
        specs = tuple(flat * len(leaves) if len(flat) == 1 else flat)
        if len(specs) != len(leaves):
            raise ValueError(
                f"stage_boundary: sharding has {len(specs)} specs but x has {len(leaves)} leaves; "
                "give one PartitionSpec for all leaves, or one for each"
            )
    return jax.tree.unflatten(tree, stage_boundary_p.bind(*leaves, name=name, sharding=specs))


@stage_boundary_p.def_impl
def _impl(*xs, name, sharding):
    return list(xs)


@stage_boundary_p.def_abstract_eval
def _abstract_eval(*avals, name, sharding):
    return list(avals)


def _jvp(primals, tangents, *, name, sharding):
    return stage_boundary_p.bind(*primals, name=name, sharding=sharding), list(tangents)


def _batch(args, dims, *, name, sharding):
    # A batching axis would shift the axes that a spec names, so the spec is dropped with it.
    return stage_boundary_p.bind(*args, name=name, sharding=None), list(dims)


ad.primitive_jvps[stage_boundary_p] = _jvp
batching.primitive_batchers[stage_boundary_p] = _batch
mlir.register_lowering(stage_boundary_p, lambda ctx, *xs, name, sharding: list(xs))
