"""What capture hands on: programs, stages, and the `StageGraph` that joins them.

A `Program` is a closed jaxpr with flat arguments and results. A stage has up to six of them; how
their arguments are put together is data (`PassSpec`), so that whoever runs them needs to know
nothing of models: *resident* arrays (parameters or prologue results), *batch* leaves of the
microbatch, and *values* (bundles of arrays, by index into ``StageGraph.graph.values``).

Equal stages hold the very same `Program` objects: compile by identity and each is compiled once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe.scheduling.graph import Graph


@dataclass(frozen=True, eq=False)
class Program:
    """A closed jaxpr without constants (they are arguments), to be compiled once per device.

    Buffers that may be overwritten: accumulators always, reusable cotangents where the plan says
    so (`PassSpec.reusable` and ``Run.reuse`` together; a W never reuses a cotangent).
    """

    name: str
    jaxpr: Any  # jax.extend.core.ClosedJaxpr
    flops: float = 0.0


@dataclass(frozen=True)
class PassSpec:
    """How a pass's program is called: ``program(*accumulators, *resident, *batch, *values)``.

    ``accumulators``: whether the stage's accumulators come first, in the arguments and in the
    results (True for B and W of a stage with gradients; each is ``accumulator + gradient``).
    ``resident``: positions in the stage's resident list. ``batch``: positions in the flat list of
    microbatch inputs (batch leaves, then the folded key). ``reads``: value ids whose bundles are
    appended in this order. ``writes``: value ids whose bundles make up the results (after the
    accumulators) in this order. ``reusable``: those of ``reads`` whose buffers may be donated,
    provided this pass is their last reader on its device.
    """

    program: Program
    resident: tuple[int, ...]
    batch: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    accumulators: bool = False
    reusable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One stage: which leaves it reads and the programs of its passes.

    ``params``: flat positions in the parameter tree of the leaves this stage uses. ``constants``:
    arrays closed over by the model that this stage uses. The stage's *resident* list is
    ``(*params, *constants, *prologue(*params, *constants))``; where ``prologue`` is None the last
    part is empty. The prologue runs once per step. ``accumulate``: positions in the resident
    list that receive gradients, with ``accumulator_avals`` their shapes and dtypes (grad_dtype).
    Gradients of parameters: ``epilogue(*params, *constants, *accumulators)`` once per step gives
    one gradient for each position in ``grad_params`` (flat parameter positions); where it is None,
    accumulator k is the gradient of ``grad_params[k]``. A leaf of ``params`` that is not in
    ``grad_params`` gets zero gradient from this stage.
    """

    index: int
    lines: str
    segments: tuple[int, ...]
    params: tuple[int, ...]
    constants: tuple[Any, ...]
    batch: tuple[int, ...]
    prologue: Program | None
    resident_avals: tuple[jax.core.ShapedArray, ...]
    accumulate: tuple[int, ...]
    accumulator_avals: tuple[jax.core.ShapedArray, ...]
    grad_params: tuple[int, ...]
    epilogue: Program | None
    passes: dict[str, PassSpec] = field(default_factory=dict)  # "F", "B", "I", "W"
    residual_nbytes: int = 0
    vjp_residual_nbytes: int = 0
    param_nbytes: int = 0


@dataclass(frozen=True)
class StageGraph:
    """A model cut into stages.

    ``bundles[v]``: the avals of the arrays of ``graph.values[v]``. ``outputs``: for each flat
    output leaf of the user's function (loss first), the value id and the position in its bundle.
    ``param_avals`` and ``batch_avals``: flat, the latter of one microbatch (then the key).
    Passes I of stages that have no input gradient have no PassSpec (nothing to run).
    """

    stages: tuple[Stage, ...]
    graph: Graph
    bundles: tuple[tuple[jax.core.ShapedArray, ...], ...]
    outputs: tuple[tuple[int, int], ...]
    param_avals: tuple[jax.core.ShapedArray, ...]
    batch_avals: tuple[jax.core.ShapedArray, ...]
