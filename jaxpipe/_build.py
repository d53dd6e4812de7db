"""From a call to a compiled pipeline: the passes of the design's section 1, in order.

    trace, read_outputs     what the function computes and returns       capture, _calls
    group                   segments into stages                         plan
    build                   the stage graph                              capture
    check, plan             the schedule against it                      scheduling
    lay out                 leaves onto devices                          lower.place
    compile                 programs                                     lower.jobs, lower.compile

`build` does all but the last and allocates nothing on devices; `compile_built` makes an `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxpipe import capture
from jaxpipe._calls import (
    Call,
    Outputs,
    batch_axes,
    flat_function,
    microbatch_structs,
    read_outputs,
    struct,
)
from jaxpipe._options import Options
from jaxpipe.capture import StageGraph, Traced
from jaxpipe.errors import PipelineError
from jaxpipe.lower.compile import Executables, compile_jobs
from jaxpipe.lower.jobs import step_jobs
from jaxpipe.lower.memory import Memory, memory_of
from jaxpipe.lower.microbatch import Axes
from jaxpipe.lower.place import Layout, check_spec, make_layout
from jaxpipe.plan.group import group
from jaxpipe.runtime.execute import Engine
from jaxpipe.runtime.transport import DevicePutTransport
from jaxpipe.runtime.workers import Workers
from jaxpipe.scheduling import Plan, Schedule, plan, resolve


@dataclass(frozen=True, eq=False)
class Built:
    """A pipeline for one kind of call, with nothing on devices yet."""

    options: Options
    call: tuple[Any, ...]  # avals of the whole batch's leaves, then of the key
    traced: Traced
    groups: tuple[int, ...]
    outputs: Outputs
    axes: Axes
    graph: StageGraph
    schedule: Schedule
    plan: Plan
    layout: Layout
    memory: tuple[Memory, ...]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A built pipeline and the engine that runs it."""

    built: Built
    engine: Engine
    executables: Executables


def schedule_of(options: Options, devices: int) -> Schedule:
    """The schedule for so many devices. Raises `ScheduleError` or `PipelineError`."""
    schedule = options.schedule
    if isinstance(schedule, Schedule) and schedule.devices != devices:
        raise PipelineError(
            f"the schedule {schedule.name!r} is for {schedule.devices} devices, but the mesh's "
            f"axis {options.axis!r} has {devices}. Give a mesh of {schedule.devices}, such as "
            f'jax.make_mesh(({schedule.devices},), ("{options.axis}",), '
            f"devices=jax.devices()[:{schedule.devices}]), or a schedule for {devices}."
        )
    if isinstance(schedule, Schedule) and schedule.microbatches != options.microbatches:
        raise PipelineError(
            f"the schedule {schedule.name!r} is for {schedule.microbatches} microbatches, but "
            f"microbatches={options.microbatches} is asked for; make them equal."
        )
    return resolve(schedule, devices, int(options.microbatches))


def trace_call(fun: Callable, options: Options, call: Call, submesh: Mesh) -> tuple[Traced, Axes]:
    """Trace the function on one microbatch of the call's shapes."""
    axes = batch_axes(options, call)
    args = microbatch_structs(call, axes, options.microbatches)
    with _mesh_context(submesh):
        return capture.trace(flat_function(fun, call.has_key), args), axes


def build(
    fun: Callable,
    options: Options,
    call: Call,
    mesh: Mesh,
    submeshes: Sequence[Mesh],
    *,
    gradients: bool,
    groups: tuple[int, ...] | None = None,
) -> Built:
    """Trace, cut, check and plan. ``groups``: how segments were made stages before, if they were.

    ``gradients``: whether the schedule's backwards run, or its forwards alone.
    """
    _check_grad_dtype(options)
    traced, axes = trace_call(fun, options, call, submeshes[0])  # what M does not divide is refused
    schedule = schedule_of(options, len(submeshes))
    outputs = read_outputs(options, traced.out_tree, traced.out_avals)
    if groups is None or sum(groups) != len(traced.segments):
        groups = group(
            traced.segments,
            schedule.stages,
            explicit=options.stages,
            unused_marks=traced.unused_marks,
        )
    if not gradients:
        schedule = schedule.forward()
    elif options.reduce == "concat":
        raise PipelineError(
            'with reduce="concat" there is no loss to differentiate; use reduce="mean", "sum" or '
            '"weighted" for .value_and_grad and .train_step.'
        )
    elif schedule.forward_only:
        raise PipelineError(
            f"the schedule {schedule.name!r} is forward only: it has no B, I or W actions. Use a "
            "schedule with backwards for gradients; forward-only ones serve calls alone."
        )

    def attempt(residuals: str | Sequence[str]) -> Built:
        with _mesh_context(submeshes[0]):
            graph = capture.build(
                traced,
                groups,
                seeds=outputs.seeds if gradients else None,
                residuals=residuals,
                grad_dtype=options.grad_dtype,
            )
        schedule.check(graph.graph)
        made = plan(schedule, graph.graph, accumulate=options.accumulate)
        layout = _lay_out(options, call, graph, schedule, mesh)
        memory = memory_of(graph, made, layout)
        avals = tuple(map(struct, call.batch))
        return Built(
            options, avals, traced, groups, outputs, axes, graph, schedule, made, layout, memory
        )

    return _fit(attempt, options)


def _check_grad_dtype(options: Options) -> None:
    """Refuse a dtype that JAX's present configuration would narrow."""
    if options.grad_dtype is None:
        return
    wanted = jnp.dtype(options.grad_dtype)
    has = jax.dtypes.canonicalize_dtype(wanted)
    if has != wanted:
        raise PipelineError(
            f"grad_dtype={wanted.name} would become {has.name}, for jax_enable_x64 is off; call "
            f'jax.config.update("jax_enable_x64", True) first, or give {has.name}.'
        )


def compile_built(built: Built, workers: Workers) -> Compiled:
    """Compile the programs and make the engine."""
    schedule = built.schedule
    with _mesh_context(built.layout.submeshes[0]):
        table = step_jobs(
            built.graph,
            built.plan.lists,
            built.layout,
            microbatches=schedule.microbatches,
            rules=built.outputs.rules,
            batch=built.call,
            axes=built.axes,
            weighted=built.outputs.weighted and not schedule.forward_only,
        )
        executables = compile_jobs(table, title=schedule.name or "pipeline")
    memory = [
        m.with_temporaries(t) for m, t in zip(built.memory, executables.temporaries, strict=True)
    ]
    _check_limit(memory, built.options.memory_limit)
    platform = built.layout.mesh.devices.flat[0].platform
    engine = Engine(
        built.graph,
        built.plan,
        built.layout,
        executables,
        workers,
        DevicePutTransport(),
        axes=built.axes,
        wait=platform == "cpu",
    )
    return Compiled(built, engine, executables)


def _mesh_context(submesh: Mesh) -> AbstractContextManager:
    """Lets ``with_sharding_constraint`` in the model name the submesh's axes."""
    if not submesh.axis_names:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(submesh.abstract_mesh)


def _lay_out(
    options: Options, call: Call, graph: StageGraph, schedule: Schedule, mesh: Mesh
) -> Layout:
    owners: list[set[int]] = [set() for _ in call.params]
    for stage in graph.stages:
        for leaf in stage.params:
            owners[leaf].add(schedule.placement[stage.index])
    return make_layout(mesh, options.axis, owners, leaf_specs(options, call, mesh))


def leaf_specs(options: Options, call: Call, mesh: Mesh) -> list[PartitionSpec]:
    """The layout of every parameter leaf within a submesh, from the prefix ``param_specs``."""
    found: list[Any] = []

    def broadcast(spec: Any, subtree: Any) -> None:
        found.extend([PartitionSpec() if spec is None else spec] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(
            broadcast,
            options.param_specs,
            call.unflat_params,
            is_leaf=lambda node: node is None or isinstance(node, PartitionSpec),
        )
    except ValueError as error:
        raise PipelineError(
            f"param_specs is no prefix of the parameters: {error} Give one PartitionSpec for all, "
            "or a tree like the parameters' whose leaves are PartitionSpecs or None."
        ) from error
    paths = jax.tree_util.tree_leaves_with_path(call.unflat_params)
    for (path, leaf), spec in zip(paths, found, strict=True):
        name = "params" + jax.tree_util.keystr(path)
        check_spec(name, jnp.shape(leaf), spec, mesh, options.axis)
    return found


def _fit(attempt: Callable[[Any], Built], options: Options) -> Built:
    """Build; where min-cut residuals do not fit in memory, recompute the largest of them."""
    built = attempt(options.residuals)
    if options.memory_limit is None:
        return built
    stages = len(built.graph.stages)
    modes = (
        [options.residuals] * stages
        if isinstance(options.residuals, str)
        else list(options.residuals)
    )
    while True:
        too_much = {d for d, m in enumerate(built.memory) if m.total > options.memory_limit}
        placement = built.schedule.placement
        open_ = [s for s in range(stages) if modes[s] == "min_cut" and placement[s] in too_much]
        if not open_:
            _check_limit(built.memory, options.memory_limit)
            return built
        largest = max(open_, key=lambda s: built.graph.stages[s].residual_nbytes)
        modes[largest] = "recompute"
        built = attempt(modes)


def _check_limit(memory: Sequence[Memory], limit: float | None) -> None:
    if limit is None:
        return
    for device, need in enumerate(memory):
        if need.total > limit:
            raise PipelineError(
                f"device {device} needs {need}, which is more than memory_limit={limit:,.0f} "
                'bytes. Use more devices, smaller microbatches, residuals="recompute", or a '
                "schedule with fewer microbatches in flight."
            )
