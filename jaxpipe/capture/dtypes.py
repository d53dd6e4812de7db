"""In which dtype the gradient of a parameter is accumulated."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def accumulator_dtype(own: Any, wanted: Any) -> Any:
    """``wanted`` (``grad_dtype``) for real parameters of dtype ``own``; their own where None.

    A complex parameter's gradient stays complex, with parts of at least that precision.

    >>> accumulator_dtype(jnp.dtype("bfloat16"), jnp.float32)
    dtype('float32')
    >>> accumulator_dtype(jnp.dtype("complex64"), jnp.bfloat16)
    dtype('complex64')
    """
    if wanted is None:
        return own
    if not jnp.issubdtype(own, jnp.complexfloating):
        return jnp.dtype(wanted)
    return jnp.dtype("complex128" if jnp.dtype(wanted).itemsize > 4 else "complex64")
