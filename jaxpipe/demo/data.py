"""Text for the demo: bytes to learn from and bytes held out.

The text is the Python standard library's own sources, which lie on every machine with Python, or
a file that the user names. A token is a byte, so there are 256 of them and nothing to download.
This file knows numpy only: no model and no jax.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 256
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
_HOLD_OUT_EVERY = 16  # every 16th file of the standard library is held out


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, each a flat ``uint8`` array.

    >>> corpus = Corpus.from_bytes(b"abcdefghij" * 100, name="letters")
    >>> len(corpus.train), len(corpus.held_out)
    (900, 100)
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def standard_library(cls, *, limit: int = 16_000_000) -> Corpus:
        """The ``.py`` files of the running Python, in the order of their paths.

        Whole files are held out (every 16th), so that held-out text is text of other files.
        ``limit`` caps the number of bytes read. Tests and installed packages are left out.
        """
        root = Path(sysconfig.get_path("stdlib"))
        train: list[np.ndarray] = []
        held_out: list[np.ndarray] = []
        size = 0
        for index, path in enumerate(_sources(root)):
            text = np.frombuffer(path.read_bytes(), np.uint8)
            size += len(text)
            if size > limit:
                break
            (held_out if index % _HOLD_OUT_EVERY == 0 else train).append(text)
        if not train or not held_out:
            raise ValueError(
                f"This Python has no standard library sources in {root}. "
                "Name a text to learn from: jaxpipe demo --text FILE"
            )
        return cls("the Python standard library", np.concatenate(train), np.concatenate(held_out))

    @classmethod
    def from_bytes(cls, text: bytes, *, name: str) -> Corpus:
        """A text whose last tenth is held out."""
        data = np.frombuffer(text, np.uint8)
        cut = len(data) - len(data) // 10
        return cls(name, data[:cut], data[cut:])

    @classmethod
    def from_file(cls, path: Path) -> Corpus:
        """The bytes of a file; the last tenth is held out."""
        return cls.from_bytes(path.read_bytes(), name=path.name)

    def check_context(self, context: int) -> None:
        """Raise ValueError if a part is too short for one window of ``context + 1`` bytes."""
        for part, data in (("training", self.train), ("held-out", self.held_out)):
            if len(data) < context + 1:
                raise ValueError(
                    f"The {part} part of {self.name} has {len(data)} bytes, but a window of "
                    f"context {context} needs {context + 1}. "
                    "Give a longer --text or a smaller --context."
                )

    def training_batch(self, step: int, *, size: int, context: int, seed: int) -> dict:
        """The batch of a training step: random windows, the same for the same (seed, step).

        Returns ``{"inputs": (size, context) int32, "targets": (size, context) int32}``, the
        targets one byte ahead of the inputs.
        """
        rng = np.random.default_rng((seed, step))
        return _windows(self.train, rng.integers(0, len(self.train) - context, size), context)

    def held_out_batches(self, count: int, *, size: int, context: int) -> list[dict]:
        """``count`` batches of evenly spaced windows of the held-out text."""
        last = len(self.held_out) - context - 1
        starts = np.linspace(0, last, count * size).astype(np.int64)
        return [_windows(self.held_out, part, context) for part in starts.reshape(count, size)]


def _sources(root: Path) -> list[Path]:
    paths = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    return sorted(paths, key=lambda p: p.relative_to(root).as_posix())


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> dict:
    rows = data[starts[:, None] + np.arange(context + 1)].astype(np.int32)  # (B, T + 1)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
