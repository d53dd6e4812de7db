"""Capture: from a user's function to a `StageGraph` of programs.

    trace          one flat forward program, its segments            trace.py
    cut            one forward program per stage                      cut.py
    split_prologue work on parameters alone, once per step            prologue.py
    differentiate  one joint forward-backward program per stage       differentiate.py
    split          the programs of F, B, I, W and what is kept        split.py, recompute.py
    build          the above in order, joined into a graph            build.py, programs.py

Capture knows no schedule and no devices.
"""

from jaxpipe.capture.boundary import stage_boundary
from jaxpipe.capture.build import build
from jaxpipe.capture.ir import PassSpec, Program, Stage, StageGraph
from jaxpipe.capture.trace import Segment, Traced, trace

__all__ = [
    "PassSpec",
    "Program",
    "Segment",
    "Stage",
    "StageGraph",
    "Traced",
    "build",
    "stage_boundary",
    "trace",
]
