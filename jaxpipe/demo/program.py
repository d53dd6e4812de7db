"""The demo's program: the way of a user's training script, with a comparison beside it.

The decoder is trained twice on the same batches from the same initial parameters, once through
the pipeline and once by one plain jitted program per step; the two take turns, so that each step
is a pair whose times can be compared. Batches have B sequences of T bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import jaxpipe as jp
from jaxpipe.demo.data import Corpus
from jaxpipe.demo.display import results_table, training_progress
from jaxpipe.demo.model import Decoder, loss_of, optimizer
from jaxpipe.demo.plain import PlainState, plain_step
from jaxpipe.demo.sampling import printable, sample
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.view.grid import print_grid

PROMPT = b"def "
HELD_OUT_BATCHES = 16
UNTIMED_STEPS = 3  # the first steps compile and fill caches


@dataclass(frozen=True)
class Options:
    """What a demo does; ``batch`` counts sequences, ``context`` bytes."""

    steps: int
    layers: int
    width: int
    heads: int
    batch: int
    context: int
    seed: int
    reference: bool
    out: Path
    learning_rate: float = 3e-3
    sample_length: int = 300


@dataclass
class Record:
    """Losses and seconds of every step, of the pipelined training and of the plain one."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plain_losses: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        """Median over the timed pairs of pipelined / plain seconds; NaN if none is timed."""
        pairs = list(zip(self.seconds, self.plain_seconds, strict=True))
        ratios = [ours / plain for ours, plain in pairs[UNTIMED_STEPS:]]
        return statistics.median(ratios) if ratios else math.nan


def run(options: Options, schedule: Schedule, corpus: Corpus, console: Console) -> Record:
    """Train, compare, and print; returns the record of the training."""
    model = Decoder(options.layers, options.width, options.heads, options.context)
    batch = partial(
        corpus.training_batch, size=options.batch, context=options.context, seed=options.seed
    )
    held_out = corpus.held_out_batches(
        HELD_OUT_BATCHES, size=options.batch, context=options.context
    )
    params = model.init(jax.random.key(options.seed), jnp.zeros((1, options.context), jnp.int32))
    loss = partial(loss_of, model)
    adamw = optimizer(options.steps, learning_rate=options.learning_rate)
    plain_loss = jax.jit(loss)

    # The pipeline: the same loss and optimizer, cut into stages and run by the schedule.
    mesh = jax.make_mesh(
        (schedule.devices,),
        ("pipe",),
        devices=jax.devices()[: schedule.devices],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    loss_fn = jp.pipeline(loss, schedule=schedule, microbatches=schedule.microbatches, mesh=mesh)
    _say_what_runs(console, options, params, corpus)
    lowered = loss_fn.lower(params, batch(0))
    console.print(lowered if console.is_terminal else str(lowered), markup=False, highlight=False)
    console.print()
    _show_schedule(console, lowered)

    step = loss_fn.train_step(adamw)
    state = step.init(params)
    plain = plain_step(loss, adamw, microbatches=schedule.microbatches)
    plain_state = PlainState(*_copied((params, adamw.init(params))))
    before = _mean_loss(plain_loss, params, held_out)
    console.print(f"held-out loss before training: {before:.3f} nats per byte", highlight=False)

    record = Record()
    tokens = options.batch * options.context

    def pipelined(rows: dict) -> None:
        nonlocal state
        begun = time.perf_counter()
        state, metrics = step(state, rows)
        jax.block_until_ready(state)
        record.seconds.append(time.perf_counter() - begun)
        record.losses.append(float(metrics["loss"]))

    def unpipelined(rows: dict) -> None:
        nonlocal plain_state
        begun = time.perf_counter()
        plain_state, value = plain(plain_state, rows)
        jax.block_until_ready(plain_state)
        record.plain_seconds.append(time.perf_counter() - begun)
        record.plain_losses.append(float(value))

    turns = [pipelined, unpipelined] if options.reference else [pipelined]

    def train(number: int) -> None:
        rows = batch(number)
        for turn in turns if number % 2 else reversed(turns):
            turn(rows)

    train(0)  # compiles, which shows a progress bar of its own
    with training_progress(console, options.steps) as report:
        for number in range(options.steps):
            if number:
                train(number)
            report(number, record.losses[-1], tokens / record.seconds[-1])

    trained = loss_fn.gather(state.params)
    _say_results(
        console,
        options,
        record,
        pipelined_loss=_mean_loss(loss_fn, state.params, held_out),
        plain_loss=_mean_loss(plain_loss, plain_state.params, held_out),
    )
    _say_sample(console, options, model, trained)
    lowered.save_timeline(options.out)
    console.print(f"timeline of a step, simulated: {options.out}", highlight=False, soft_wrap=True)
    return record


def _copied(tree: Any) -> Any:
    """A copy on the first device, which the plain step may donate."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0], may_alias=False), tree)


def _mean_loss(loss: Any, params: Any, batches: list[dict]) -> float:
    return statistics.fmean(float(loss(params, batch)) for batch in batches)


def _say_what_runs(console: Console, options: Options, params: Any, corpus: Corpus) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    console.print(
        f"a decoder of {options.layers} blocks, width {options.width}, {count:,} parameters; "
        f"text: {corpus.name}, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out",
        highlight=False,
    )


def _show_schedule(console: Console, lowered: Any) -> None:
    timeline = lowered.simulate()
    console.print("the schedule, simulated:", style="bold")
    print_grid(timeline, console=console)
    console.print(str(timeline), markup=False, highlight=False)


def _say_results(
    console: Console, options: Options, record: Record, *, pipelined_loss: float, plain_loss: float
) -> None:
    ours = _median_step(record.seconds)
    loss = "held-out loss (nats per byte)"
    if not options.reference:
        console.print(f"{loss}: {pipelined_loss:.4f}; median step: {ours}", highlight=False)
        return
    theirs = _median_step(record.plain_seconds)
    ratio = record.ratio()
    emulated = jax.default_backend() == "cpu" and jax.device_count() > 1
    console.print(
        results_table(
            [
                (loss, f"{pipelined_loss:.4f}", f"{plain_loss:.4f}"),
                ("median step", ours, theirs),
                ("median of step pairs", "-" if math.isnan(ratio) else f"{ratio:.2f}", "1"),
            ]
        )
    )
    if emulated:
        console.print(
            "(emulated devices share this machine's cores, which the un-pipelined step has too)",
            highlight=False,
        )


def _median_step(seconds: list[float]) -> str:
    timed = seconds[UNTIMED_STEPS:]
    return f"{1e3 * statistics.median(timed):.1f} ms" if timed else "(too few steps to time)"


def _say_sample(console: Console, options: Options, model: Decoder, params: Any) -> None:
    text = sample(
        model,
        jax.device_put(params, jax.devices()[0]),
        PROMPT,
        length=options.sample_length,
        temperature=0.7,
        seed=options.seed,
    )
    console.print("\na sample:", style="bold")
    console.print(printable(PROMPT + text), markup=False, highlight=False)
    console.print()
