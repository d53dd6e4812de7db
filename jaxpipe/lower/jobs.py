"""The jobs of one step: which programs each device runs, in which variants, with what shardings.

The instruction lists say which passes run, which cotangent buffers a run may overwrite and whether
it adds its weight gradients to the accumulators at once; every combination that occurs is a job.
Beside the passes a device has: prologues and epilogues of its stages, zeros for its accumulators,
their division by the sum of weights, and additions of pending gradients.

Roles: ``("run", stage, kind, reuse, accumulate)``, ``("add", stage)``, ``("prologue", stage)``,
``("epilogue", stage)``, ``("zeros", stages)``, ``("scale", stages)``, ``("cut",)``, ``("join",)``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.capture.ir import PassSpec, Program, Stage, StageGraph
from jaxpipe.lower.compile import Callee, Job, JobTable
from jaxpipe.lower.microbatch import Axes, Rule, cutter, joiner
from jaxpipe.lower.place import Layout
from jaxpipe.scheduling.instructions import Accumulate, Instruction, Run


def step_jobs(
    graph: StageGraph,
    lists: Sequence[Sequence[Instruction]],
    layout: Layout,
    *,
    microbatches: int,
    rules: Sequence[Rule],
    batch: Sequence[Any],
    axes: Axes,
    weighted: bool = False,
) -> JobTable:
    """The jobs that one step's instruction lists call for.

    ``rules``: how each output is joined over microbatches. ``batch``: avals of the whole batch's
    leaves, then of the key if there is one; ``axes``: the axis along which each leaf is cut (the
    key is folded). ``weighted``: accumulators are divided by a scalar, output 1, at the end.
    """
    table = JobTable(roles=[{} for _ in range(layout.devices)])
    funs = _Functions()
    for device, instructions in enumerate(lists):
        trained: dict[int, None] = {}
        stages: dict[int, None] = {}
        for instruction in instructions:
            if isinstance(instruction, Run):
                stage = graph.stages[instruction.action.stage]
                stages[stage.index] = None
                if instruction.action.kind != "F":
                    trained[stage.index] = None
                _add_run(table, funs, graph, layout, device, stage, instruction)
            elif isinstance(instruction, Accumulate):
                _add_sum(table, funs, layout, device, graph.stages[instruction.stage])
        for index in stages:
            _add_prologue(table, funs, graph, layout, device, graph.stages[index])
        for index in trained:
            _add_epilogue(table, funs, graph, layout, device, graph.stages[index])
        _add_accumulators(table, funs, graph, layout, device, tuple(trained), weighted)
        specs = run_specs(graph, instructions)
        _add_cut(table, funs, layout, device, specs, microbatches, batch, axes)
        _add_join(table, funs, graph, layout, device, specs, microbatches, rules)
    return table


def run_specs(graph: StageGraph, instructions: Iterable[Instruction]) -> list[PassSpec]:
    """The passes that an instruction list runs, each once."""
    runs = [i.action for i in instructions if isinstance(i, Run)]
    passes = dict.fromkeys((action.stage, action.kind) for action in runs)
    found = (graph.stages[stage].passes.get(kind) for stage, kind in passes)
    return [spec for spec in found if spec is not None]


def batch_positions(specs: Iterable[PassSpec]) -> list[int]:
    """Positions of the flat batch that these passes read, ascending."""
    return sorted({position for spec in specs for position in spec.batch})


def is_cut(position: int, axes: Axes) -> bool:
    """Whether a position of the flat batch differs between microbatches (the key always does)."""
    return position >= len(axes) or axes[position] is not None


def _add_cut(
    table: JobTable,
    funs: _Functions,
    layout: Layout,
    device: int,
    specs: Sequence[PassSpec],
    microbatches: int,
    batch: Sequence[Any],
    axes: Axes,
) -> None:
    positions = tuple(p for p in batch_positions(specs) if is_cut(p, axes))
    if not positions:
        return
    cut_axes = tuple(axes[p] if p < len(axes) else None for p in positions)
    keys = tuple(p >= len(axes) for p in positions)
    whole = layout.replicated[device]
    table.add(
        device,
        ("cut",),
        ("cut", device, positions),
        lambda: Job(
            name="cut the batch",
            fun=funs.get(
                ("cut", cut_axes, keys),
                "cut_batch",
                lambda: cutter(cut_axes, keys, microbatches),
            ),
            avals=tuple(_struct(batch[p]) for p in positions),
            in_shardings=(whole,) * len(positions),
            out_shardings=whole,
        ),
    )


def _add_join(
    table: JobTable,
    funs: _Functions,
    graph: StageGraph,
    layout: Layout,
    device: int,
    specs: Sequence[PassSpec],
    microbatches: int,
    rules: Sequence[Rule],
) -> None:
    made = {value for spec in specs for value in spec.writes}
    own = [k for k, (value, _) in enumerate(graph.outputs) if value in made]
    if not own:
        return
    avals = [graph.bundles[graph.outputs[k][0]][graph.outputs[k][1]] for k in own]
    own_rules = tuple(rules[k] for k in own)
    whole = layout.replicated[device]
    table.add(
        device,
        ("join",),
        ("join", device),
        lambda: Job(
            name="join outputs",
            fun=funs.get(
                ("join", own_rules), "join_outputs", lambda: joiner(own_rules, microbatches)
            ),
            avals=tuple(_struct(a) for a in avals for _ in range(microbatches)),
            in_shardings=(whole,) * (len(own) * microbatches),
            out_shardings=whole,
        ),
    )


class _Functions:
    """One Python function per (program, form), so that JAX traces it once for all devices."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Callee] = {}

    def get(self, key: Hashable, name: str, make: Callable[[], Callee]) -> Callee:
        if key not in self._made:
            fun = make()
            fun.__name__ = fun.__qualname__ = name
            self._made[key] = fun
        return self._made[key]

    def of_program(self, program: Program) -> Callee:
        def make() -> Callee:
            evaluate = jaxpr_as_fun(program.jaxpr)
            return lambda *args: list(evaluate(*args))

        return self.get(id(program), _identifier(program.name), make)

    def pending(self, program: Program, avals: Sequence[Any]) -> Callee:
        """``program`` with accumulators of zero: its weight gradients of one microbatch alone."""
        run = self.of_program(program)

        def make() -> Callee:
            return lambda *args: run(*(jnp.zeros(a.shape, a.dtype) for a in avals), *args)

        return self.get((id(program), "pending"), _identifier(program.name) + "_pending", make)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def accumulator_shardings(layout: Layout, stage: Stage, device: int) -> list[NamedSharding]:
    """An accumulator of a parameter is laid out like it; others are whole on each chip."""
    resident = _resident_shardings(layout, stage, device)
    return [resident[position] for position in stage.accumulate]


def _resident_shardings(layout: Layout, stage: Stage, device: int) -> list[NamedSharding]:
    params = [layout.local[device][leaf] for leaf in stage.params]
    whole = layout.replicated[device]
    return params + [whole] * (len(stage.resident_avals) - len(params))


def _specs(shardings: Sequence[NamedSharding]) -> tuple[PartitionSpec, ...]:
    return tuple(s.spec for s in shardings)


def _add_run(
    table: JobTable,
    funs: _Functions,
    graph: StageGraph,
    layout: Layout,
    device: int,
    stage: Stage,
    run: Run,
) -> None:
    spec = stage.passes.get(run.action.kind)
    role = ("run", stage.index, run.action.kind, run.reuse, run.accumulate)
    if spec is None or role in table.roles[device]:
        return
    whole = layout.replicated[device]
    resident = _resident_shardings(layout, stage, device)
    sums = accumulator_shardings(layout, stage, device) if spec.accumulators else []
    held = sums if run.accumulate else []
    avals = list(stage.accumulator_avals[: len(held)])
    avals += [stage.resident_avals[i] for i in spec.resident]
    avals += [graph.batch_avals[i] for i in spec.batch]
    donate = list(range(len(held)))
    for value in spec.reads:
        bundle = graph.bundles[value]
        if value in run.reuse:
            donate += range(len(avals), len(avals) + len(bundle))
        avals += bundle
    shardings = [*held, *(resident[i] for i in spec.resident)]
    shardings += [whole] * (len(avals) - len(shardings))
    results = sum(len(graph.bundles[value]) for value in spec.writes)
    key = (id(spec.program), run.accumulate, tuple(donate), device, _specs(shardings))
    table.add(
        device,
        role,
        key,
        lambda: Job(
            name=spec.program.name,
            fun=funs.of_program(spec.program)
            if run.accumulate or not sums
            else funs.pending(spec.program, stage.accumulator_avals),
            avals=tuple(map(_struct, avals)),
            in_shardings=tuple(shardings),
            out_shardings=[*sums, *[whole] * results],
            donate=tuple(donate),
        ),
    )


def _add_sum(table: JobTable, funs: _Functions, layout: Layout, device: int, stage: Stage) -> None:
    """``accumulators + pending``, for weight gradients that came out of microbatch order."""
    role = ("add", stage.index)
    if not stage.accumulate or role in table.roles[device]:
        return
    shardings = accumulator_shardings(layout, stage, device)
    avals = tuple(map(_struct, stage.accumulator_avals))
    count = len(avals)

    def make() -> Callee:
        return lambda *args: [a + b for a, b in zip(args[:count], args[count:], strict=True)]

    signature = (tuple((a.shape, a.dtype) for a in avals), _specs(shardings))
    table.add(
        device,
        role,
        ("add", device, *signature),
        lambda: Job(
            name="add pending weight gradients",
            fun=funs.get(("add", count), "add_pending", make),
            avals=avals * 2,
            in_shardings=tuple(shardings) * 2,
            out_shardings=shardings,
            donate=tuple(range(count)),
        ),
    )


def _add_prologue(
    table: JobTable, funs: _Functions, graph: StageGraph, layout: Layout, device: int, stage: Stage
) -> None:
    program = stage.prologue
    if program is None:
        return
    count = len(stage.params) + len(stage.constants)
    shardings = _resident_shardings(layout, stage, device)[:count]
    table.add(
        device,
        ("prologue", stage.index),
        (id(program), device, _specs(shardings)),
        lambda: Job(
            name=program.name,
            fun=funs.of_program(program),
            avals=tuple(map(_struct, stage.resident_avals[:count])),
            in_shardings=tuple(shardings),
            out_shardings=[layout.replicated[device]] * (len(stage.resident_avals) - count),
        ),
    )


def _add_epilogue(
    table: JobTable, funs: _Functions, graph: StageGraph, layout: Layout, device: int, stage: Stage
) -> None:
    program = stage.epilogue
    if program is None:
        return
    count = len(stage.params) + len(stage.constants)
    sums = accumulator_shardings(layout, stage, device)
    shardings = _resident_shardings(layout, stage, device)[:count] + sums
    results = [layout.local[device][leaf] for leaf in stage.grad_params]
    table.add(
        device,
        ("epilogue", stage.index),
        (id(program), device, _specs(shardings), _specs(results)),
        lambda: Job(
            name=program.name,
            fun=funs.of_program(program),
            avals=tuple(map(_struct, (*stage.resident_avals[:count], *stage.accumulator_avals))),
            in_shardings=tuple(shardings),
            out_shardings=results,
            donate=tuple(range(count, count + len(sums))),
        ),
    )


def _add_accumulators(
    table: JobTable,
    funs: _Functions,
    graph: StageGraph,
    layout: Layout,
    device: int,
    stages: tuple[int, ...],
    weighted: bool,
) -> None:
    """Zeros for all accumulators of the device, and their division by the sum of weights."""
    avals: list[Any] = []
    shardings: list[NamedSharding] = []
    for index in stages:
        avals += map(_struct, graph.stages[index].accumulator_avals)
        shardings += accumulator_shardings(layout, graph.stages[index], device)
    if not avals:
        return
    signature = (tuple((a.shape, a.dtype) for a in avals), _specs(shardings))
    table.add(
        device,
        ("zeros", stages),
        ("zeros", device, *signature),
        lambda: Job(
            name="zero accumulators",
            fun=funs.get(
                ("zeros", signature[0]),
                "zero_accumulators",
                lambda: lambda: [jnp.zeros(a.shape, a.dtype) for a in avals],
            ),
            avals=(),
            in_shardings=(),
            out_shardings=shardings,
        ),
    )
    if weighted:
        weight = graph.bundles[graph.outputs[1][0]][graph.outputs[1][1]]
        table.add(
            device,
            ("scale", stages),
            ("scale", device, *signature),
            lambda: Job(
                name="divide by the sum of weights",
                fun=funs.get("scale", "divide_by_weight", lambda: divide_by),
                avals=(_struct(weight), *avals),
                in_shardings=(layout.replicated[device], *shardings),
                out_shardings=shardings,
                donate=tuple(range(1, 1 + len(avals))),
            ),
        )


def divide_by(weight: jax.Array, *sums: jax.Array) -> list[jax.Array]:
    """Each sum divided by ``weight`` in its own dtype."""
    return [total / weight.astype(total.dtype) for total in sums]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )
