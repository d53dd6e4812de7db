"""Which device owns each leaf of a training state, and hiding leaves that have no gradient.

An *owner* is a device 0..P-1, or `ALL` for a leaf of which every device holds an equal copy
(counters, learning rates, random keys). Owners of parameters are given; those of optimizer state
may be `UNKNOWN`, and `find_owners` derives them from what the update does with each leaf: a moment
is combined with the gradient of one device, so it lives there. Names of leaves decide only where
the update leaves it open. This file knows nothing of programs or rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.lower.flatten_update import ALL, Flattened, TracedUpdate, flatten_update

UNKNOWN = -2


def split_float(tree: Any) -> tuple[Any, Any]:
    """The floating (or complex) leaves of a tree, and all others; `None` stands for what is gone.

    An optimizer sees only the first half: integer, boolean and key leaves have no gradient.
    Inverse of `merge`.

    >>> split_float({"w": jnp.ones(2), "steps": jnp.zeros((), int)})[1]
    {'steps': Array(0, dtype=int32), 'w': None}
    """

    def is_float(leaf: Any) -> bool:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return bool(jnp.issubdtype(dtype, jnp.inexact))

    return (
        jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if is_float(leaf) else leaf, tree),
    )


def merge(tree: Any, rest: Any) -> Any:
    """One tree of two halves: leaves of ``tree``, and those of ``rest`` where it has `None`.

    Inverse of `split_float`.

    >>> merge({"w": 1.5, "n": None}, {"w": None, "n": 3})
    {'n': 3, 'w': 1.5}
    """
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        tree,
        rest,
        is_leaf=lambda leaf: leaf is None,
    )


def find_owners(traced: TracedUpdate, owners: Sequence[int], *, home: int = 0) -> tuple[int, ...]:
    """``owners`` of the flat inputs of an update, with every `UNKNOWN` replaced.

    A state leaf lives where its new value is made. A leaf whose new value needs no device's data
    lives with the leaf whose path it ends with (``opt_state[0].v['dense']['kernel']`` with
    ``params['dense']['kernel']``), or with its only user, or everywhere if it has several users;
    on ``home`` if it has none. A scalar is held by all, unless it belongs to a scalar parameter.

    Raises `PipelineError` as `flatten_update` does.
    """
    found = [ALL if owner == UNKNOWN else owner for owner in owners]
    unknown = [i for i, owner in enumerate(owners) if owner == UNKNOWN]
    anchors = _Anchors(traced, owners)
    for i in unknown:
        if traced.avals[i].shape == ():
            owner = anchors.owner(i)
            found[i] = ALL if owner is None else owner
    open_ = [i for i in unknown if traced.avals[i].shape != ()]
    while True:
        flat = flatten_update(traced, found)
        moved = []
        for i in open_:
            device = _maker(traced, flat, i)
            if device != ALL:
                found[i] = device
                moved.append(i)
        if not moved:
            break
        open_ = [i for i in open_ if i not in set(moved)]
    users = _users(flat)
    for i in open_:
        output = flat.outputs[i] if i < traced.state_leaves else None
        place = flat.places[output] if isinstance(output, int) else None
        if place is not None and place.local > 1:
            continue  # made of scalars of several devices: every device holds it
        named = anchors.owner(i)
        if named is not None and users[i] <= {named}:
            found[i] = named
        elif len(users[i]) < 2:
            found[i] = next(iter(users[i]), home)
    return tuple(found)


def _maker(traced: TracedUpdate, flat: Flattened, leaf: int) -> int:
    """The device on which the new value of a state leaf is made, or `ALL`."""
    output = flat.outputs[leaf] if leaf < traced.state_leaves else None
    return flat.places[output].device if isinstance(output, int) else ALL


def _users(flat: Flattened) -> list[set[int]]:
    """For each value the devices that read it, or what is made of it without other data."""
    users: list[set[int]] = [set() for _ in flat.avals]
    for step in reversed(flat.steps):
        devices: set[int] = set()
        for output in step.outputs:
            device = flat.places[output].device
            devices |= users[output] if device == ALL else {device}
        for atom in step.inputs:
            if isinstance(atom, int):
                users[atom] |= devices
    return users


class _Anchors:
    """Leaves of known owner, found by the end of their path."""

    def __init__(self, traced: TracedUpdate, owners: Sequence[int]):
        self._traced = traced
        self._by_end: dict[tuple[Any, ...], set[int]] = {}
        for i, owner in enumerate(owners):
            if owner >= 0:
                for end in self._ends(i):
                    self._by_end.setdefault(end, set()).add(owner)

    def _ends(self, leaf: int) -> list[tuple[Any, ...]]:
        keys = tuple(str(key) for key in self._traced.keys[leaf])
        scalar = self._traced.avals[leaf].shape == ()
        return [(scalar, *keys[start:]) for start in range(1, len(keys))]

    def owner(self, leaf: int) -> int | None:
        """The owner of the leaves with the longest common end of path, if they have just one."""
        for end in self._ends(leaf):  # longest first
            if end in self._by_end:
                owners = self._by_end[end]
                return next(iter(owners)) if len(owners) == 1 else None
        return None
