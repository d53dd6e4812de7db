"""What a step needs on each device, in bytes, from shapes alone.

This file knows no arrays: it adds up what the layout, the stage graph and the plan say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from jaxpipe.capture.ir import StageGraph
from jaxpipe.lower.place import Layout
from jaxpipe.scheduling.instructions import Plan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each chip of one device.

    ``parameters``: leaves that the device's stages use. ``resident``: constants of the model and
    prologue results. ``accumulators``: of weight gradients. ``peak``: the most that values of
    microbatches take at once (activations, residuals, cotangents, receive buffers).
    ``temporaries``: the scratch space of its largest program, None before compilation.
    """

    parameters: int
    resident: int
    accumulators: int
    peak: int
    temporaries: int | None = None

    @property
    def total(self) -> int:
        """The sum of all that is known."""
        return (
            self.parameters
            + self.resident
            + self.accumulators
            + self.peak
            + (self.temporaries or 0)
        )

    def with_temporaries(self, nbytes: int) -> Memory:
        """The same with the largest program's scratch space."""
        return replace(self, temporaries=nbytes)

    def __str__(self) -> str:
        parts = [f"{self.parameters:,} of parameters"]
        if self.resident:
            parts.append(f"{self.resident:,} of constants and prologue results")
        parts.append(f"{self.accumulators:,} of accumulators")
        parts.append(f"{self.peak:,} of activations, residuals and cotangents")
        if self.temporaries is not None:
            parts.append(f"{self.temporaries:,} of temporaries")
        return f"{self.total:,} bytes ({', '.join(parts)})"


def memory_of(graph: StageGraph, plan: Plan, layout: Layout) -> tuple[Memory, ...]:
    """What each device needs, temporaries apart."""
    placement = plan.schedule.placement
    backward = not plan.schedule.forward_only
    found = []
    for device in range(layout.devices):
        stages = [stage for stage in graph.stages if placement[stage.index] == device]
        parameters = sum(
            _nbytes(graph.param_avals[leaf], sharding)
            for leaf, sharding in layout.local[device].items()
        )
        resident = sum(
            _nbytes(aval) for stage in stages for aval in stage.resident_avals[len(stage.params) :]
        )
        accumulators = sum(
            _nbytes(aval, layout.local[device][stage.params[position]])
            if position < len(stage.params)
            else _nbytes(aval)
            for stage in stages
            for aval, position in zip(stage.accumulator_avals, stage.accumulate, strict=True)
        )
        found.append(
            Memory(
                parameters=parameters,
                resident=resident,
                accumulators=accumulators if backward else 0,
                peak=int(plan.peaks[device]),
            )
        )
    return tuple(found)


def _nbytes(aval: Any, sharding: NamedSharding | None = None) -> int:
    shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
    return math.prod(shape) * aval.dtype.itemsize
