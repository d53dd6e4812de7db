"""The `jaxpipe` command: flags, and what they mean for the parts that do the work.

Each subcommand has a function that adds its flags and one that runs it. jax is imported only by
those that train, and only after the environment says how many CPU devices to emulate. Input that
cannot be used ends in one sentence and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from absl import app, flags, logging
from absl.flags import argparse_flags

from jaxpipe import schedule_source
from jaxpipe.errors import PipelineError, ScheduleError

if TYPE_CHECKING:
    from jaxpipe.demo.data import Corpus
    from jaxpipe.scheduling.schedule import Schedule

HEADS = 4  # of the demo's decoder
PICTURES = (".svg", ".png", ".pdf")
_EMULATION = re.compile(r"--xla_force_host_platform_device_count=(\d+)")

_DESCRIPTION = """\
Pipeline-parallel training of ordinary flax models with schedules that you write.

  jaxpipe demo                                train a small language model through a pipeline
  jaxpipe demo --schedule=zb_v --devices=2    with another schedule of the library
  jaxpipe demo --schedule=my_schedule.py      with a schedule of your own
"""

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

_SCHEDULE = (
    "a name of the library, with options if any: 1f1b, 'interleaved(chunks=4)'; "
    "or a file that holds your own: .py (file.py:name where it defines several), "
    ".json, .txt or .csv (default: %(default)s)"
)


class CommandError(ValueError):
    """Flags that cannot be used, in a sentence for the person who typed them."""


class Parser(argparse_flags.ArgumentParser):
    """An argparse parser that keeps the layout of help texts, and exits with 1 on bad flags."""

    def __init__(self, **options: object) -> None:
        super().__init__(
            **{
                "formatter_class": argparse.RawDescriptionHelpFormatter,
                "inherited_absl_flags": None,
                "allow_abbrev": False,
                **options,
            }
        )

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def run() -> None:
    """The entry point of the `jaxpipe` command."""
    app.run(main, flags_parser=lambda argv: parser().parse_args(argv[1:]))


def main(args: argparse.Namespace) -> int:
    """Run the subcommand of parsed ``args``; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # jax tells at INFO which accelerators it lacks
    try:
        args.command(args)
    except (CommandError, ScheduleError, PipelineError) as error:
        print(f"jaxpipe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(prog="jaxpipe", description=_DESCRIPTION, inherited_absl_flags=flags.FLAGS)
    top.add_argument("--version", action="version", version=f"jaxpipe {version('jaxpipe')}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    return top


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo", help="train a small language model through a pipeline", description=_DEMO
    )
    demo.add_argument("--schedule", default="1f1b", metavar="NAME|FILE", help=_SCHEDULE)
    demo.add_argument(
        "--devices",
        type=_count,
        help="devices of the pipeline (default: those of a saved schedule, the accelerators "
        f"present, or {schedule_source.DEVICES} emulated CPU devices)",
    )
    demo.add_argument(
        "--microbatches",
        type=_count,
        help="microbatches per step (default: those of a saved schedule, or "
        f"{schedule_source.MICROBATCHES})",
    )
    for name, default, text in (
        ("steps", 200, "training steps"),
        ("layers", 8, "blocks of the decoder; it can be cut between any two"),
        ("width", 128, f"width of the decoder, a multiple of {HEADS}"),
        ("batch", 16, "sequences per step, a multiple of the microbatches"),
        ("context", 128, "bytes per sequence"),
        ("seed", 0, "of the parameters, the batches and the sample"),
    ):
        demo.add_argument(
            f"--{name}",
            type=_natural if name == "seed" else _count,
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
        help="where to write the picture of a step, .svg or .png (default: %(default)s)",
    )
    demo.set_defaults(command=_demo)


def _demo(args: argparse.Namespace) -> None:
    _check_sizes(args)
    corpus = _corpus(args.text, args.context)
    source = schedule_source.read_source(args.schedule)
    wanted = args.devices or getattr(source, "devices", None)
    emulate_cpu_devices(wanted or schedule_source.DEVICES)

    import jax
    from rich.console import Console

    schedule = schedule_source.build(
        source,
        called=args.schedule,
        devices=wanted or len(jax.devices()),
        microbatches=args.microbatches,
    )
    _check_schedule(schedule, args, present=len(jax.devices()), kind=jax.default_backend())
    from jaxpipe.demo import program

    options = program.Options(
        steps=args.steps,
        layers=args.layers,
        width=args.width,
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


def _count(text: str) -> int:
    """The type of flags that count something: an integer >= 1."""
    return _integer_from(text, 1)


def _natural(text: str) -> int:
    return _integer_from(text, 0)


def _integer_from(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
    return int(text)


if __name__ == "__main__":
    run()
