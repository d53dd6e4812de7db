"""What the subcommands share: the parser, types of flags, and the error for flags.

Bad flags end in one sentence and exit code 1, as in absl.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from absl.flags import argparse_flags

SCHEDULE_HELP = (
    "a name of the library, with options if any: 1f1b, 'interleaved(chunks=4)'; "
    "or a file that holds your own: .py (file.py:name where it defines several), "
    ".json, .txt or .csv"
)


class CommandError(ValueError):
    """Flags that cannot be used, in a sentence for the person who typed them."""


class Parser(argparse_flags.ArgumentParser):
    """An argparse parser that keeps the layout of help texts, and exits with 1 on bad flags."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("inherited_absl_flags", None)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def count(text: str) -> int:
    """The type of flags that count something: an integer >= 1."""
    return _integer(text, least=1)


def natural(text: str) -> int:
    """The type of a seed: an integer >= 0."""
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r}")
    return int(text)
