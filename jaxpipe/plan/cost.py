"""Costs of a cut model, from the operations of its programs."""

from __future__ import annotations

from jaxpipe.capture.ir import StageGraph
from jaxpipe.scheduling.costs import Costs


def flops_costs(graph: StageGraph, *, flops_per_unit: float = 1e9) -> Costs:
    """Times of F, I, W and B of each stage, proportional to the operations of its programs.

    With the default unit a time is in GFLOP; give a device's operations per second to get seconds.
    What a stage does not run costs nothing; transfers are free (set them with
    ``dataclasses.replace(costs, latency=..., bandwidth=...)``).
    """

    def times(kind: str) -> tuple[float, ...]:
        passes = (stage.passes.get(kind) for stage in graph.stages)
        return tuple(p.program.flops / flops_per_unit if p else 0.0 for p in passes)

    return Costs(F=times("F"), I=times("I"), W=times("W"), B=times("B"))
