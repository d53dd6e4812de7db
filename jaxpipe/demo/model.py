"""The demo's model: a byte-level decoder in flax, an ordinary module with boundaries in it.

Shapes: B sequences of T bytes, width D. Nothing in this file knows of devices or schedules;
`jaxpipe.stage_boundary` marks where the model may be cut and does nothing otherwise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxpipe as jp
from jaxpipe.demo.data import VOCABULARY


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer; each adds to the residual stream."""

    heads: int
    layers: int  # of the whole decoder: scales the initial output projections

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (B, T, D) -> (B, T, D)
        batch, length, width = x.shape
        into_stream = nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5)

        h = nn.LayerNorm()(x)
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(h)  # (B, T, 3D)
        q, k, v = jnp.split(
            qkv.reshape(batch, length, 3 * self.heads, width // self.heads), 3, axis=2
        )  # each (B, T, H, D / H)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # (B, T, H, D / H)
        h = h.reshape(batch, length, width)
        x = x + nn.Dense(width, use_bias=False, kernel_init=into_stream, name="out")(h)

        h = nn.LayerNorm()(x)
        h = nn.gelu(nn.Dense(4 * width, name="up")(h))  # (B, T, 4D)
        return x + nn.Dense(width, kernel_init=into_stream, name="down")(h)


class Decoder(nn.Module):
    """Predicts the next byte. ``layers - 1`` boundaries: the model may be cut between blocks."""

    layers: int
    width: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) int32 -> (B, T, 256)
        x = nn.Embed(VOCABULARY, self.width, name="bytes")(tokens)  # (B, T, D)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (self.context, self.width)
        )
        x = x + positions[: tokens.shape[1]]
        for layer in range(self.layers):
            if layer:
                x = jp.stage_boundary(x)
            x = Block(self.heads, self.layers, name=f"block_{layer}")(x)
        head = nn.Dense(VOCABULARY, kernel_init=nn.initializers.normal(0.02), name="head")
        return head(nn.LayerNorm()(x))


def loss_of(model: Decoder, params: Any, batch: dict) -> jax.Array:
    """Mean cross-entropy of the next byte, in nats per byte."""
    logits = model.apply(params, batch["inputs"])  # (B, T, 256)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def optimizer(steps: int, *, learning_rate: float) -> optax.GradientTransformation:
    """AdamW with a short warm-up, a cosine down to a tenth, and clipping by the global norm."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, min(20, steps // 10)),
        decay_steps=max(2, steps),
        end_value=learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01)
    )
