"""`jaxpipe demo`: its flags, and what must hold before a model is made.

jax is imported only after the environment says how many CPU devices to emulate. What the demo
does is in `jaxpipe.demo`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe import schedule_source
from jaxpipe.commands.flags import SCHEDULE_HELP, CommandError, count, natural
from jaxpipe.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from jaxpipe.demo.data import Corpus
    from jaxpipe.scheduling.schedule import Schedule

HEADS = 4  # of the demo's decoder
PICTURES = (".svg", ".png", ".pdf")
_EMULATION = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_DEMO = """\
Train a byte-level flax decoder through a pipeline, on the accelerators of this machine or
else on emulated CPU devices, beside the same training without a pipeline.

examples:
  jaxpipe demo
  jaxpipe demo --schedule='interleaved(chunks=2)' --steps=50
  jaxpipe demo --schedule=my_schedule.py --devices=2 --microbatches=4
  jaxpipe demo --schedule=saved.json --text=novel.txt --out=step.png
  JAX_PLATFORMS=cpu jaxpipe demo --devices=8      emulated devices even where there is a GPU
"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand to the parser."""
    demo = commands.add_parser(
        "demo", help="train a small language model through a pipeline", description=_DEMO
    )
    demo.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME|FILE",
        help=f"{SCHEDULE_HELP} (default: %(default)s)",
    )
    demo.add_argument(
        "--devices",
        type=count,
        help="devices of the pipeline (default: those of a saved schedule, the accelerators "
        f"present, or {schedule_source.DEVICES} emulated CPU devices)",
    )
    demo.add_argument(
        "--microbatches",
        type=count,
        help="microbatches per step (default: those of a saved schedule, or "
        f"{schedule_source.MICROBATCHES})",
    )
    for name, default, text in (
        ("steps", 160, "training steps"),
        ("layers", 8, "blocks of the decoder; it can be cut between any two"),
        ("width", 128, f"width of the decoder, a multiple of {HEADS}"),
        ("batch", 16, "sequences per step, a multiple of the microbatches"),
        ("context", 128, "bytes per sequence"),
        ("seed", 0, "of the parameters, the batches and the sample"),
    ):
        demo.add_argument(
            f"--{name}",
            type=natural if name == "seed" else count,
            default=default,
            help=f"{text} (default: %(default)s)",
        )
    demo.add_argument(
        "--text", type=Path, metavar="FILE", help="learn from this file, not the standard library"
    )
    demo.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train without a pipeline too, and compare",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("jaxpipe_demo.svg"),
        metavar="FILE",
        help="where to write the picture of a step, .svg, .png or .pdf (default: %(default)s)",
    )
    demo.set_defaults(command=run_demo)


def run_demo(args: argparse.Namespace) -> None:
    """Check the flags, start jax, and run the demo."""
    _check_sizes(args)
    corpus = _corpus(args.text, args.context)
    source = schedule_source.read_source(args.schedule)
    wanted = args.devices or getattr(source, "devices", None)
    keep_freed_memory()
    emulate_cpu_devices(wanted or schedule_source.DEVICES)

    present = _devices_present()
    import jax
    from rich.console import Console

    schedule = schedule_source.build(
        source,
        called=args.schedule,
        devices=wanted or present,
        microbatches=args.microbatches,
    )
    _check_schedule(schedule, args, present=present, kind=jax.default_backend())
    from jaxpipe.demo import program

    options = program.Options(
        steps=args.steps,
        layers=args.layers,
        width=args.width,
        heads=HEADS,
        batch=args.batch,
        context=args.context,
        seed=args.seed,
        reference=args.reference,
        out=args.out,
    )
    program.run(options, schedule, corpus, Console(soft_wrap=not sys.stdout.isatty()))


def emulate_cpu_devices(count: int) -> None:
    """Ask XLA for ``count`` CPU devices, unless the environment asks for a number already.

    Must run before jax is initialised. Where there are accelerators it changes nothing.
    """
    asked = os.environ.get("XLA_FLAGS", "")
    if not _EMULATION.search(asked):
        emulation = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{asked} {emulation}".strip()


def _devices_present() -> int:
    """How many devices jax has. Starts it, which fails where the environment asks in vain."""
    import jax

    try:
        return len(jax.devices())
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        reason = str(error).partition("\n")[0]
        hint = f" JAX_PLATFORMS={asked} is set; unset it, or set it to cpu." if asked else ""
        raise CommandError(
            f"jax finds no devices{f': {reason}' if reason else '.'}{hint}"
        ) from None


def _corpus(text: Path | None, context: int) -> Corpus:
    from jaxpipe.demo.data import Corpus

    if text is not None and not text.is_file():
        raise CommandError(f"--text: there is no file {text}.")
    try:
        corpus = Corpus.standard_library() if text is None else Corpus.from_file(text)
        corpus.check_context(context)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    return corpus


def _check_sizes(args: argparse.Namespace) -> None:
    if args.width % HEADS:
        raise CommandError(
            f"--width {args.width} is not a multiple of {HEADS}, the number of attention heads."
        )
    if args.out.suffix not in PICTURES:
        raise CommandError(f"--out {args.out}: a picture ends in one of {', '.join(PICTURES)}.")
    if not args.out.parent.is_dir():
        raise CommandError(f"--out {args.out}: there is no folder {args.out.parent}.")


def _check_schedule(
    schedule: Schedule, args: argparse.Namespace, *, present: int, kind: str
) -> None:
    """What depends on the schedule's sizes, said in terms of the flags."""
    name = schedule.name or args.schedule
    if args.batch % schedule.microbatches:
        raise CommandError(
            f"--batch {args.batch} cannot be cut into {schedule.microbatches} equal microbatches. "
            f"Give --batch a multiple of {schedule.microbatches}, or change --microbatches."
        )
    if schedule.stages > args.layers:
        raise CommandError(
            f"The schedule {name} has {schedule.stages} stages on {schedule.devices} devices, but "
            f"a decoder of --layers {args.layers} can be cut into {args.layers} at most. "
            f"Give --layers {schedule.stages} or more, or fewer --devices."
        )
    if schedule.forward_only:
        raise CommandError(f"The schedule {name} has no backward actions: it cannot train.")
    if schedule.devices > present:
        advice = (
            "XLA_FLAGS in the environment sets this number; unset it."
            if kind == "cpu"
            else "JAX_PLATFORMS=cpu jaxpipe demo ... emulates as many as you like."
        )
        raise CommandError(
            f"The schedule {name} needs {schedule.devices} devices, but there are {present} "
            f"({kind}). {advice}"
        )
