"""Train a small decoder on a text file through a pipeline: a program to start your own from.

    python examples/train_decoder.py --text=README.md --schedule=zb_h1 --steps=100

Runs on the accelerators of this machine. Without any, emulate some:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_decoder.py
"""

import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import linen as nn

import jaxpipe as jp

SCHEDULE = flags.DEFINE_string("schedule", "1f1b", "A name of the library, with options if any.")
MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches per step.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 100, "Training steps.", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", 8, "Blocks of the decoder.", lower_bound=1)
WIDTH = flags.DEFINE_integer("width", 128, "Width of the decoder, a multiple of 4.", lower_bound=4)
BATCH = flags.DEFINE_integer("batch", 16, "Sequences per step.", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 64, "Bytes per sequence.", lower_bound=1)
TEXT = flags.DEFINE_string("text", typing.__file__, "The file to learn from, byte by byte.")
PICTURE = flags.DEFINE_string("picture", None, "Where to write a timeline, .svg, .png or .pdf.")


class Block(nn.Module):
    """A pre-norm transformer block."""

    @nn.compact
    def __call__(self, x):  # (B, T, D) -> (B, T, D)
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h, mask=mask)
        h = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(h))


class Decoder(nn.Module):
    """An ordinary flax module; every block starts where the model may be cut."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, tokens):  # (B, T) int32 -> (B, T, 256)
        x = nn.Embed(256, self.width)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        for layer in range(self.layers):
            if layer:
                x = jp.stage_boundary(x)
            x = Block()(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def windows(text: np.ndarray, rng: np.random.Generator) -> dict:
    """A batch: ``inputs`` and, one byte ahead, ``targets``, both (B, T)."""
    starts = rng.integers(0, len(text) - CONTEXT.value, BATCH.value)
    rows = text[starts[:, None] + np.arange(CONTEXT.value + 1)].astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    text = np.frombuffer(Path(TEXT.value).read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    model = Decoder(LAYERS.value, WIDTH.value)
    params = model.init(jax.random.key(0), windows(text, rng)["inputs"])

    @jp.pipeline(schedule=SCHEDULE.value, microbatches=MICROBATCHES.value)
    def loss_fn(params, batch):
        logits = model.apply(params, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    lowered = loss_fn.lower(params, windows(text, rng))
    print(lowered)  # where the model is cut, and what each stage costs
    if PICTURE.value:
        lowered.save_timeline(PICTURE.value)

    step = loss_fn.train_step(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    state = step.init(params)
    for number in range(STEPS.value):
        state, metrics = step(state, windows(text, rng))
        if number % 10 == 0 or number == STEPS.value - 1:
            print(f"step {number:4d}  loss {metrics['loss']:.3f}  |g| {metrics['grad_norm']:.3f}")


if __name__ == "__main__":
    app.run(main)
