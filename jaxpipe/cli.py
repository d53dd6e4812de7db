"""The `jaxpipe` command: joins the subcommands of `jaxpipe.commands`, and ends them well.

Input that cannot be used ends in one sentence and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version

from absl import app, flags, logging

from jaxpipe.commands import demo, schedules
from jaxpipe.commands.flags import CommandError, Parser
from jaxpipe.errors import PipelineError, ScheduleError

_DESCRIPTION = """\
Pipeline-parallel training of ordinary flax models with schedules that you write.

examples:
  jaxpipe demo                                train a small language model through a pipeline
  jaxpipe demo --schedule=zb_v --devices=2    with another schedule of the library
  jaxpipe demo --schedule=my_schedule.py      with a schedule of your own
  jaxpipe show zb_h1 -p 4 -m 8 -o zb_h1.svg   draw a schedule over time
"""


def run() -> None:
    """The entry point of the `jaxpipe` command."""
    app.run(main, flags_parser=lambda argv: parser().parse_args(argv[1:]))


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(prog="jaxpipe", description=_DESCRIPTION, inherited_absl_flags=flags.FLAGS)
    top.add_argument("--version", action="version", version=f"jaxpipe {version('jaxpipe')}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add(commands)
    schedules.add(commands)
    return top


def main(args: argparse.Namespace) -> int:
    """Run the subcommand of parsed ``args``; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # jax tells at INFO which accelerators it lacks
    try:
        args.command(args)
    except (CommandError, ScheduleError, PipelineError) as error:
        print(f"jaxpipe: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has had enough, as in `jaxpipe show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    run()
