"""Calls apart from the caller's mesh.

``with jax.set_mesh(mesh):`` tells every program of the thread its devices, but a pipeline is many
programs on different devices, each of which is told its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from jaxpipe.capture._jax_compat import is_tracing

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_meshes(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``method``, run as if no mesh had been set by `jax.set_mesh`."""

    @functools.wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if is_tracing() or jax.sharding.get_abstract_mesh().empty:
            return method(*args, **kwargs)
        with jax.set_mesh(None):
            return method(*args, **kwargs)

    return call
