"""The colours of actions, one for each kind, told apart also by colour-blind readers.

Okabe and Ito's palette ("Color Universal Design", 2008); later chunks of a device are lighter.
"""

from __future__ import annotations

KIND_COLORS = {"F": "#0072B2", "B": "#D55E00", "I": "#E69F00", "W": "#009E73"}
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
LIGHTEST = 0.45  # how far the last of many chunks is moved towards white


def color(kind: str, chunk: int = 0, chunks: int = 1) -> str:
    """The fill of an action of a device's c-th of v chunks, as ``#rrggbb``.

    >>> color("F"), color("F", chunk=1, chunks=2)
    ('#0072B2', '#73B1D5')
    """
    base = KIND_COLORS[kind]
    if chunks < 2 or chunk == 0:
        return base
    share = LIGHTEST * chunk / (chunks - 1)
    parts = (int(base[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02X}" for part in parts)


def text_color(fill: str) -> str:
    """Black or white, whichever reads better on ``fill``.

    >>> text_color("#0072B2"), text_color("#E69F00")
    ('#FFFFFF', '#000000')
    """
    red, green, blue = (int(fill[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#FFFFFF"
