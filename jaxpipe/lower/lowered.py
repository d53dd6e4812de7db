"""`Lowered`: a pipeline that has been built and not compiled, to be looked at.

It holds shapes and source lines only; nothing of it is on a device. Compilation happens when
``memory_with_temporaries`` asks for it. This file draws nothing itself: tables and pictures are
made by `jaxpipe.view`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from jaxpipe.lower.memory import Memory
from jaxpipe.plan import flops_costs
from jaxpipe.scheduling import Costs, Graph, Plan, Schedule, Timeline

if TYPE_CHECKING:
    from jaxpipe.capture import StageGraph, Traced


_UNIT = "a device's mean forward of one microbatch, predicted from FLOPs"


@dataclass(frozen=True, eq=False, repr=False)
class Lowered:
    """What ``loss_fn.lower(params, batch)`` returns.

    ``str`` of it is the stage table: for each stage its device, segments, source lines, bytes of
    parameters, FLOPs of one microbatch (forward and backward), bytes of residuals (what was chosen,
    and what `jax.vjp` alone would save) and of each edge out of it.

    Attributes:
      schedule: the `Schedule`, checked against the model.
      graph: the `Graph` of values between passes, with their bytes.
      plan: instruction lists of all devices (``print(lowered.plan)``).
      memory: one `Memory` for each device, without the temporaries of programs.
      stage_graph: the stages and their programs (jaxprs).
    """

    schedule: Schedule
    plan: Plan
    memory: tuple[Memory, ...]
    stage_graph: StageGraph
    traced: Traced
    _compile_memory: Callable[[], tuple[Memory, ...]]

    @property
    def graph(self) -> Graph:
        return self.stage_graph.graph

    def memory_with_temporaries(self) -> tuple[Memory, ...]:
        """`memory` with each device's largest scratch space; compiles all programs."""
        return self._compile_memory()

    @property
    def costs(self) -> Costs:
        """Times of passes in proportion to their FLOPs.

        The unit is a device's forward of one microbatch through all its stages, on the mean of the
        devices, so that schedules with different numbers of stages can be compared.
        """
        forward = sum(self._flops(stage, "F") for stage in range(self.graph.stages))
        unit = forward / len(set(self.schedule.placement))
        return flops_costs(self.stage_graph, flops_per_unit=unit or 1.0)

    def _flops(self, stage: int, kind: str) -> float:
        spec = self.stage_graph.stages[stage].passes.get(kind)
        return float(spec.program.flops) if spec is not None else 0.0

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """The schedule run under ``costs``, by default in proportion to FLOPs (`costs`)."""
        if costs is not None:
            return self.schedule.simulate(costs, self.graph)
        return replace(self.schedule.simulate(self.costs, self.graph), time_unit=_UNIT)

    def save_timeline(self, path: str | PathLike[str], costs: Costs | None = None) -> None:
        """Draw the simulated step to ``path``: ``.svg``, ``.png`` or ``.pdf``."""
        from jaxpipe.view.timeline import save_timeline

        save_timeline(self.simulate(costs), path)

    def rows(self) -> list[dict[str, Any]]:
        """The stage table as data, one mapping for each stage."""
        backward = not self.schedule.forward_only
        found = []
        for stage in self.stage_graph.stages:
            kinds = "FB" if backward else "F"
            row: dict[str, Any] = {
                "stage": stage.index,
                "device": self.schedule.placement[stage.index],
                "segments": stage.segments,
                "name": ", ".join(self.traced.segments[s].name or "" for s in stage.segments),
                "lines": stage.lines,
                "param_nbytes": stage.param_nbytes,
                "flops": sum(self._flops(stage.index, kind) for kind in kinds),
                "edges": self._edges(stage.index),
            }
            if not row["name"].strip(", "):
                del row["name"]
            if backward:
                row["residual_nbytes"] = stage.residual_nbytes
                row["vjp_residual_nbytes"] = stage.vjp_residual_nbytes
            found.append(row)
        return found

    def _edges(self, stage: int) -> dict[int, int]:
        """Bytes of one microbatch that the stage's forward hands to each later stage."""
        sizes: dict[int, int] = {}
        for value in self.graph.values:
            if value.producer == (stage, "F"):
                for reader in {s for s, kind in value.readers if kind == "F" and s != stage}:
                    sizes[reader] = sizes.get(reader, 0) + value.nbytes
        return dict(sorted(sizes.items()))

    def __str__(self) -> str:
        from jaxpipe.view.table import stage_table

        return str(stage_table(self.rows()))

    def __rich__(self) -> Any:
        from jaxpipe.view.table import stage_table

        return stage_table(self.rows()).rich()

    def __repr__(self) -> str:
        return f"Lowered({self.schedule!r})"
