"""Meshes of emulated devices, and small helpers that all tests of whole pipelines share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def pipe_mesh(devices: int, axis: str = "pipe") -> Mesh:
    """The first ``devices`` emulated devices on one axis."""
    return jax.make_mesh(
        (devices,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def assert_close(ours: Any, theirs: Any) -> None:
    """The law of DESIGN.md section 3, per leaf; trees must agree in structure and dtype."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype and a.shape == b.shape, (name, a.dtype, b.dtype)
        if a.dtype == jax.dtypes.float0:
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        gap = np.abs(x - y)
        assert np.max(gap, initial=0.0) <= 1e-4 * np.max(np.abs(y), initial=0.0) + 1e-7, name
        assert np.linalg.norm(gap) <= 1e-5 * np.linalg.norm(y) + 1e-7, name


def assert_equal(ours: Any, theirs: Any) -> None:
    """Bitwise equality, per leaf."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert a.dtype == b.dtype and a.shape == b.shape, jax.tree_util.keystr(path)
        if a.dtype != jax.dtypes.float0:
            assert np.array_equal(a, b, equal_nan=True), jax.tree_util.keystr(path)
