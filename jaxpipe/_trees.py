"""Comparing trees, and saying where they differ."""

from __future__ import annotations

from typing import Any

import jax

from jaxpipe.errors import PipelineError


def check_same_tree(what: str, given: Any, known: Any) -> None:
    """Raise `PipelineError` naming the paths in which ``given`` differs from ``known``.

    >>> check_same_tree("the parameters", {"w": 1}, {"w": 2})
    >>> check_same_tree("the parameters", {"w": 1}, {"w": 2, "b": 3})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    jaxpipe.errors.PipelineError: the parameters have another structure ...: missing ['b']. ...
    """
    structures: list[Any] = [jax.tree.structure(given), jax.tree.structure(known)]
    if structures[0] == structures[1]:
        return
    ours, theirs = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (given, known)
    )
    missing = [path for path in theirs if path not in set(ours)]
    extra = [path for path in ours if path not in set(theirs)]
    parts = []
    if missing:
        parts.append(f"missing {_some(missing)}")
    if extra:
        parts.append(f"not among them {_some(extra)}")
    if not parts:
        parts.append(
            f"the leaves are the same, but their containers are {jax.tree.structure(given)} and "
            f"were {jax.tree.structure(known)}"
        )
    raise PipelineError(
        f"{what} have another structure than those that were traced: {'; '.join(parts)}. Give the "
        "same tree, or make a new pipeline with .replace()."
    )


def _some(paths: list[str]) -> str:
    shown = ", ".join(path or "a single leaf" for path in paths[:8])
    return shown if len(paths) <= 8 else f"{shown} and {len(paths) - 8} more"
