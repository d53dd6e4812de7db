"""What a pipelined step costs beside the same step without a pipeline, on the same cores.

Four things are measured, on four (eight for the last) emulated CPU devices unless the environment
says otherwise; run it on an otherwise idle machine:

- *step*: the time of a pipelined step (P = 4, M = 8) over that of the fastest plain form of the
  same decoder: one `jax.jit` program with a scan over microbatches, or a loop of jitted calls.
  Median and quartiles of the ratios of interleaved pairs. Loss and gradients, no optimizer.
- *host*: the runtime's own cost per action, (step - sum of the bare compiled calls) / actions,
  where every array has 8 elements.
- *residuals*: bytes that the stages save from F to B, over what `jax.vjp` alone would save.
- *build*: seconds to trace and lower, without XLA, a 48-block decoder on 8 stages.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --only=step --sizes=small --pairs=10 --json=out.json
    KEEP_FREED_MEMORY=0 python benchmarks/overhead.py      # with malloc's own habits
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxpipe.host_memory import keep_freed_memory

# For all forms alike, and before jax is imported; KEEP_FREED_MEMORY=0 leaves malloc as it is.
if os.environ.get("KEEP_FREED_MEMORY", "1") != "0":
    keep_freed_memory()
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from measures import build_seconds, host_seconds_per_action, residual_bytes
from paired import Spread, interleaved, ratios
from plain_forms import loop_form, scan_form
from rich.console import Console
from rich.table import Table

import jaxpipe as jp
from jaxpipe.demo.model import Decoder, loss_of

SIZES = {  # width, sequences and bytes of a microbatch
    "small": (128, 1, 128),
    "medium": (256, 8, 128),
}
DEVICES, MICROBATCHES, BLOCKS_PER_STAGE = 4, 8, 2

_PAIRS = flags.DEFINE_integer("pairs", 30, "Interleaved pairs to time.", lower_bound=2)
_SIZES = flags.DEFINE_multi_enum("sizes", list(SIZES), list(SIZES), "Sizes of the decoder.")
_SCHEDULE = flags.DEFINE_string("schedule", "1f1b", "Of the library.")
_ONLY = flags.DEFINE_multi_enum(
    "only",
    ["step", "host", "residuals", "build"],
    ["step", "host", "residuals", "build"],
    "What to measure.",
)
_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def decoder(size: str, blocks: int) -> tuple[Any, Any, dict]:
    """The loss, parameters and batch of a size."""
    width, sequences, context = SIZES[size]
    model = Decoder(layers=blocks, width=width, heads=4, context=context)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, context), jnp.int32))
    rows = np.random.default_rng(0).integers(
        0, 256, (sequences * MICROBATCHES, context + 1), dtype=np.int32
    )
    batch = {"inputs": jnp.asarray(rows[:, :-1]), "targets": jnp.asarray(rows[:, 1:])}
    return partial(loss_of, model), params, batch


def pipelined(loss: Any, devices: int, schedule: str) -> Any:
    """The pipelined form on the first ``devices`` devices."""
    mesh = jax.make_mesh(
        (devices,),
        ("pipe",),
        devices=jax.devices()[:devices],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    return jp.pipeline(loss, schedule=schedule, microbatches=MICROBATCHES, mesh=mesh)


def measure_step(size: str) -> dict:
    """Paired times of the pipelined step and the two plain forms."""
    loss, params, batch = decoder(size, DEVICES * BLOCKS_PER_STAGE)
    loss_fn = pipelined(loss, DEVICES, _SCHEDULE.value)
    placed = loss_fn.place(params, batch)
    scan = scan_form(loss, microbatches=MICROBATCHES)
    loop = loop_form(loss, microbatches=MICROBATCHES)
    times = interleaved(
        {
            "pipelined": lambda: loss_fn.value_and_grad(placed, batch),
            "scan": lambda: scan(params, batch),
            "loop": lambda: loop(params, batch),
        },
        turns=_PAIRS.value,
    )
    spreads = {name: Spread.of([1e3 * t for t in each]) for name, each in times.items()}
    fastest = min(("scan", "loop"), key=lambda name: spreads[name].median)
    to = {name: ratios(times["pipelined"], times[name]) for name in ("scan", "loop")}
    return {
        "milliseconds": spreads,
        "ratio_to": to,
        "fastest": fastest,
        "ratio": to[fastest],
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    only, sizes = dict.fromkeys(_ONLY.value), dict.fromkeys(_SIZES.value)
    console = Console(width=max(Console().width, 120))
    kept = os.environ.get("KEEP_FREED_MEMORY", "1") != "0" and keep_freed_memory()
    console.print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, {_SCHEDULE.value}, P={DEVICES}, "
        f"M={MICROBATCHES}, {BLOCKS_PER_STAGE} blocks per stage, freed host memory "
        f"{'kept' if kept else 'given back'}",
        highlight=False,
    )
    found: dict[str, Any] = {}
    if "step" in only:
        found["step"] = {size: measure_step(size) for size in sizes}
        console.print(step_table(found["step"]))
    if "host" in only:
        found["host"] = host_seconds_per_action(
            partial(pipelined, devices=DEVICES, schedule=_SCHEDULE.value)
        )
        console.print(f"host cost per action: {1e3 * found['host']:.3f} ms", highlight=False)
    if "residuals" in only:
        found["residuals"] = {}
        for size in sizes:
            loss, params, batch = decoder(size, DEVICES * BLOCKS_PER_STAGE)
            lowered = pipelined(loss, DEVICES, _SCHEDULE.value).lower(params, batch)
            saved, by_vjp = residual_bytes(lowered)
            found["residuals"][size] = {"saved": saved, "jax.vjp": by_vjp, "ratio": saved / by_vjp}
            console.print(
                f"residuals per microbatch, {size}: {saved:,} bytes, jax.vjp's {by_vjp:,}, "
                f"ratio {saved / by_vjp:.3f}",
                highlight=False,
            )
    if "build" in only:
        loss, params, batch = decoder("medium", 48)
        found["build"] = build_seconds(pipelined(loss, 8, _SCHEDULE.value), params, batch)
        console.print(
            f"tracing and lowering 48 blocks on 8 stages: {found['build']:.1f} s", highlight=False
        )
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(found, indent=2, default=vars) + "\n")


def step_table(found: dict) -> Table:
    """One row for each size; medians with quartiles."""
    table = Table(title=f"a step, median of {_PAIRS.value} interleaved pairs (quartiles)")
    for column in ("size", "pipelined ms", "scan ms", "loop ms", "pipelined / fastest plain"):
        table.add_column(column, justify="left" if column == "size" else "right")
    for size, row in found.items():
        times = [f"{row['milliseconds'][name]:.1f}" for name in ("pipelined", "scan", "loop")]
        table.add_row(size, *times, f"{row['ratio']:.3f} to {row['fastest']}")
    return table


if __name__ == "__main__":
    app.run(main)
