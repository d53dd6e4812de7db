"""Numbers for people: bytes, operations and times with a fitting unit."""

from __future__ import annotations

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(number: float, unit: str = "") -> str:
    """Three digits, a decimal prefix and a unit.

    >>> si(0, "B"), si(999, "B"), si(28_300_000, "B"), si(1.5e9, "FLOP")
    ('0 B', '999 B', '28.3 MB', '1.5 GFLOP')
    """
    for factor, prefix in _SI:
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}".rstrip()
    return f"{number:.3g} {unit}".rstrip()


def nbytes(number: float) -> str:
    """A size: ``28.3 MB`` (decimal prefixes)."""
    return si(number, "B")


def flops(number: float) -> str:
    """Operations: ``1.5 GFLOP``."""
    return si(number, "FLOP")


def counted(number: int, what: str) -> str:
    """A number of things: ``1 device``, ``2 microbatches``.

    >>> counted(1, "stage"), counted(8, "microbatch")
    ('1 stage', '8 microbatches')
    """
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what}{'es' if what.endswith('ch') else 's'}"
