"""`jaxpipe schedules`, `show` and `check`: schedules on the command line, without jax."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from jaxpipe.commands.flags import SCHEDULE_HELP, CommandError, count
from jaxpipe.schedule_source import DEVICES, MICROBATCHES, build, read_source
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.view.units import counted

PICTURES = (".svg", ".png", ".pdf")
SAVED = (".json", ".txt", ".csv")

_SHOW = """\
Draw a schedule over time, with a forward, a backward for inputs and a backward for weights of
one unit each, and say what it costs.

examples:
  jaxpipe show 1f1b
  jaxpipe show 'interleaved(chunks=2)' -p 4 -m 8 -o interleaved.svg
  jaxpipe show my_schedule.py -p 8 -m 32 -o mine.json
"""

_CHECK = """\
Check that a schedule can be run: every action once and on the device of its stage, and no device
waits for ever. Says what is wrong and exits with 1 if not.

examples:
  jaxpipe check mine.json
  jaxpipe check my_schedule.py -p 8 -m 32
"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the three subcommands to the parser."""
    listing = commands.add_parser(
        "schedules", help="list the library", description="List the library's schedules."
    )
    listing.set_defaults(command=run_list)

    show = commands.add_parser("show", help="draw a schedule over time", description=_SHOW)
    _add_schedule(show)
    show.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="also write a picture (.svg, .png, .pdf) or the schedule (.json, .txt, .csv)",
    )
    show.set_defaults(command=run_show)

    check = commands.add_parser("check", help="check a schedule of your own", description=_CHECK)
    _add_schedule(check)
    check.set_defaults(command=run_check)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="NAME|FILE", help=SCHEDULE_HELP)
    for short, name, default in (("-p", "devices", DEVICES), ("-m", "microbatches", MICROBATCHES)):
        parser.add_argument(
            short,
            f"--{name}",
            type=count,
            help=f"{name} (default: those of a saved schedule, or {default})",
        )


def run_list(args: argparse.Namespace) -> None:
    """A table: name, options, and the first line of its docstring."""
    from rich.console import Console
    from rich.table import Table

    import jaxpipe.schedules as library

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("name", "options", "what it is"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name in library.names():
        function = library.get(name)
        options = ", ".join(f"{option}={value!r}" for option, value in _options(function).items())
        table.add_row(name, options, (inspect.getdoc(function) or "").partition("\n")[0])
    Console().print(table, highlight=False, markup=False)


def _options(function: object) -> dict:
    return dict(getattr(function, "options", {}))


def run_show(args: argparse.Namespace) -> None:
    """The grid, the figures, and a file if asked for."""
    from jaxpipe.view.grid import print_grid

    if args.out is not None:
        _check_out(args.out)
    schedule = _build(args)
    timeline = schedule.simulate()
    print_grid(timeline)
    print(timeline)
    if args.out is None:
        return
    if args.out.suffix in PICTURES:
        timeline.save(args.out)
    else:
        schedule.save(args.out)
    print(f"written to {args.out}")


def run_check(args: argparse.Namespace) -> None:
    """One sentence where the schedule is right; building it raises where it is not."""
    schedule = _build(args)
    print(
        f"{schedule.name or args.schedule} can be run: {counted(schedule.devices, 'device')}, "
        f"{counted(schedule.stages, 'stage')}, {counted(schedule.microbatches, 'microbatch')}."
    )


def _build(args: argparse.Namespace) -> Schedule:
    return build(
        read_source(args.schedule),
        called=args.schedule,
        devices=args.devices,
        microbatches=args.microbatches,
    )


def _check_out(out: Path) -> None:
    if out.suffix not in PICTURES + SAVED:
        raise CommandError(
            f"--out {out}: write a picture ({', '.join(PICTURES)}) "
            f"or the schedule ({', '.join(SAVED)})."
        )
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}.")
