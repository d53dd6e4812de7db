"""Cutting a batch into microbatches, and making a step's results of its microbatches' outputs.

Microbatch i is the i-th contiguous block of every batch leaf along that leaf's axis; a leaf with
axis None goes whole to every microbatch; microbatch i of a random key is
``jax.random.fold_in(key, i)``. Outputs are joined by one *rule* each: ``"mean"``, ``"sum"``,
``"stack"`` (a new leading axis of length M) or ``("concat", axis)``. The reference uses the very
same functions. This file knows no devices and no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe._integers import integer
from jaxpipe.errors import PipelineError

Axes = tuple[int | None, ...]
Rule = str | tuple[str, int]


def resolve_axes(microbatch_axes: Any, batch: Any, microbatches: int) -> Axes:
    """The axis of each leaf of ``batch`` (flat, normalized), from a prefix tree as in `jax.vmap`.

    Raises `PipelineError` naming leaves by path where the prefix does not fit, an axis does not
    exist, sizes differ, or M does not divide them.

    >>> batch = {"x": jnp.zeros((6, 2)), "table": jnp.zeros(3)}
    >>> resolve_axes({"x": 0, "table": None}, batch, 3)
    (None, 0)
    """
    flat: list[int | None] = []

    def broadcast(axis: Any, subtree: Any) -> None:
        flat.extend([axis] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(broadcast, microbatch_axes, batch, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise PipelineError(
            f"microbatch_axes={microbatch_axes!r} is no prefix of the batch, whose structure is "
            f"{jax.tree.structure(batch)}. Give one axis for all leaves, or a tree like the "
            "batch's with axes (None: the whole leaf for every microbatch)."
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    axes: list[int | None] = []
    first: tuple[str, int] | None = None
    for (path, leaf), axis in zip(leaves, flat, strict=True):
        name = "batch" + jax.tree_util.keystr(path)
        axes.append(_checked_axis(name, jnp.shape(leaf), axis, microbatches))
        if axes[-1] is None:
            continue
        size = jnp.shape(leaf)[axes[-1]]
        if first is None:
            first = name, size
        elif first[1] != size:
            raise PipelineError(
                f"{first[0]} has {first[1]} examples, but {name}, of shape {jnp.shape(leaf)}, has "
                f"{size} along axis {axes[-1]}. All leaves must be cut alike; give the right axis "
                "of each leaf in microbatch_axes, or None for a leaf that every microbatch needs "
                "whole."
            )
    return tuple(axes)


def _checked_axis(name: str, shape: tuple[int, ...], axis: Any, microbatches: int) -> int | None:
    if axis is None:
        return None
    given = axis
    axis = integer(given)
    if axis is None:
        raise PipelineError(f"microbatch_axes gives {name} the axis {given!r}; use an int or None.")
    if not -len(shape) <= axis < len(shape):
        hint = (
            ""
            if shape
            else " It is a single number: a flag that the function needs as a Python value is "
            "closed over (functools.partial), and a list of numbers is passed as one array."
        )
        raise PipelineError(
            f"{name} has shape {shape} and no axis {axis} to cut into microbatches. Give its axis "
            f"in microbatch_axes, or None if every microbatch needs the whole leaf.{hint}"
        )
    axis %= len(shape)
    if shape[axis] % microbatches:
        raise PipelineError(
            f"{name} has size {shape[axis]} along axis {axis}, which {microbatches} microbatches "
            f"do not divide. Choose a number of microbatches that divides {shape[axis]}, change "
            "the batch, or give the leaf another axis (or None) in microbatch_axes."
        )
    return axis


def cut(leaf: Any, axis: int, microbatches: int) -> list[Any]:
    """The blocks of one leaf.

    >>> [block.tolist() for block in cut(jnp.arange(6), 0, 3)]
    [[0, 1], [2, 3], [4, 5]]
    """
    size = leaf.shape[axis] // microbatches
    return [
        lax.slice_in_dim(leaf, i * size, (i + 1) * size, axis=axis) for i in range(microbatches)
    ]


def fold(key: Any, microbatches: int) -> list[Any]:
    """The key of each microbatch."""
    return [jax.random.fold_in(key, i) for i in range(microbatches)]


def microbatch_shape(
    leaf: jax.ShapeDtypeStruct, axis: int | None, microbatches: int
) -> jax.ShapeDtypeStruct:
    """A leaf of one microbatch, abstractly."""
    shape = list(leaf.shape)
    if axis is not None:
        shape[axis] //= microbatches
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=leaf.weak_type)


def cutter(axes: Sequence[int | None], has_key: Sequence[bool], microbatches: int) -> Callable:
    """A function of leaves (or keys) that returns all their microbatches, leaf by leaf."""

    def cut_into_microbatches(*leaves: Any) -> list[Any]:
        blocks: list[Any] = []
        for leaf, axis, key in zip(leaves, axes, has_key, strict=True):
            blocks += fold(leaf, microbatches) if key else cut(leaf, axis or 0, microbatches)
        return blocks

    return cut_into_microbatches


def joiner(rules: Sequence[Rule], microbatches: int) -> Callable:
    """A function of ``len(rules) * M`` outputs, output by output, that returns one result each."""

    def join_microbatches(*outputs: Any) -> list[Any]:
        return [
            join(rule, outputs[k * microbatches : (k + 1) * microbatches])
            for k, rule in enumerate(rules)
        ]

    return join_microbatches


def join(rule: Rule, outputs: Sequence[Any]) -> Any:
    """One result of the M outputs of the microbatches, added up in their order.

    >>> float(join("mean", [jnp.float32(1), jnp.float32(2)]))
    1.5
    """
    if rule == "stack":
        return jnp.stack(outputs)
    if isinstance(rule, tuple):
        return jnp.concatenate(outputs, axis=rule[1])
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total / len(outputs) if rule == "mean" else total
