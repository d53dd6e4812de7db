"""Text from a trained decoder, one byte at a time, without a pipeline.

The whole loop is one jitted program. The model sees the last ``context`` bytes; each byte is a
full forward pass, which for a model of the demo's size is a few milliseconds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.demo.model import Decoder


def sample(
    model: Decoder, params: Any, prompt: bytes, *, length: int, temperature: float, seed: int
) -> bytes:
    """``length`` bytes that follow ``prompt``. ``temperature`` 0 takes the likeliest byte."""
    size = max(len(prompt) + length, model.context)
    text = np.zeros(size, np.int32)
    text[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    end = len(prompt) + length
    key = jax.random.key(seed)
    filled = _fill(model, params, jnp.asarray(text), len(prompt), end, temperature, key)
    return np.asarray(filled)[len(prompt) : end].astype(np.uint8).tobytes()


def printable(text: bytes) -> str:
    """``text`` for a terminal: what is not printable becomes the replacement character.

    >>> printable(b"def f(x):\\n\\x1b[2J")
    'def f(x):\\n\ufffd[2J'
    """
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


@partial(jax.jit, static_argnums=0)
def _fill(
    model: Decoder,
    params: Any,
    text: jax.Array,  # (N,) int32
    start: int,
    end: int,
    temperature: float,
    key: jax.Array,
) -> jax.Array:
    def fill_one(position: jax.Array, text: jax.Array) -> jax.Array:
        left = jnp.maximum(position - model.context, 0)
        window = jax.lax.dynamic_slice(text, (left,), (model.context,))  # bytes ahead are masked
        every: Any = model.apply(params, window[None])  # (1, context, 256)
        logits = every[0, position - 1 - left]  # (256,)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, position), logits / jnp.maximum(temperature, 1e-6)
        )
        byte = jnp.where(temperature > 0, drawn, logits.argmax())
        return text.at[position].set(byte.astype(text.dtype))

    return jax.lax.fori_loop(start, end, fill_one, text)
