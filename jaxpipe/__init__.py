"""jaxpipe: pipeline-parallel training of flax models on JAX, by a schedule of one's own.

Names are loaded when first used, so that schedules can be written, checked and drawn without
importing jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "jaxpipe.api": ("pipeline",),
    "jaxpipe.capture": ("stage_boundary",),
    "jaxpipe._pipelined": ("Pipelined",),
    "jaxpipe._train": ("TrainState", "TrainStep"),
    "jaxpipe.lower.lowered": ("Lowered",),
    "jaxpipe.errors": ("PipelineError", "ScheduleError"),
    "jaxpipe.scheduling": (
        *("B", "Costs", "F", "I", "Schedule", "Timeline", "W"),
        *("greedy", "placements", "schedule"),
    ),
}
_MODULES = ("scheduling", "schedules")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "B",
    "Costs",
    "F",
    "I",
    "Lowered",
    "PipelineError",
    "Pipelined",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "TrainState",
    "TrainStep",
    "W",
    "greedy",
    "pipeline",
    "placements",
    "schedule",
    "schedules",
    "scheduling",
    "stage_boundary",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxpipe.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from jaxpipe import schedules, scheduling
    from jaxpipe._pipelined import Pipelined
    from jaxpipe._train import TrainState, TrainStep
    from jaxpipe.api import pipeline
    from jaxpipe.capture import stage_boundary
    from jaxpipe.errors import PipelineError, ScheduleError
    from jaxpipe.lower.lowered import Lowered
    from jaxpipe.scheduling import (
        B,
        Costs,
        F,
        I,
        Schedule,
        Timeline,
        W,
        greedy,
        placements,
        schedule,
    )
