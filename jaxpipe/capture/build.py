"""Build: a traced model and a grouping of its segments -> the `StageGraph`.

The passes of section 1 of the design, in order: cut, split off prologues, differentiate and split
(from the last stage to the first, since a stage's backward depends on which later stages send it
cotangents), and join: name every value that flows between passes, with its bytes and its readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.capture.cut import StageCut, carries_gradient, cut
from jaxpipe.capture.flat import is_var, nbytes
from jaxpipe.capture.ir import PassSpec, Stage, StageGraph
from jaxpipe.capture.programs import Slot, StageSource, Template, TemplateCache, Wishes
from jaxpipe.capture.prologue import split_prologue
from jaxpipe.capture.split import RESIDUALS
from jaxpipe.capture.trace import Traced, source_range
from jaxpipe.errors import PipelineError
from jaxpipe.scheduling.graph import Graph, Pass, Value


@dataclass(frozen=True)
class _Planned:
    """A stage on its way: its cut, its variables in order, and its template."""

    cut: StageCut
    source: StageSource
    template: Template
    cotangents_from: tuple[tuple[int, ...], ...]  # per out: the stages that send a cotangent


def build(
    traced: Traced,
    groups: Sequence[int],
    *,
    seeds: Mapping[int, float] | None = None,
    residuals: str | Sequence[str] = "min_cut",
    grad_dtype: Any = None,
) -> StageGraph:
    """Cut a traced function into stages and make the programs of their passes.

    Args:
      traced: what `trace` gave.
      groups: how many consecutive segments each stage takes; sums to ``len(traced.segments)``.
      seeds: the cotangent of the function's flat results that are differentiated, by position
        (``{0: 1 / M}`` for a mean over M microbatches). Without seeds only forwards are made.
      residuals: ``"min_cut"``, ``"vjp"`` or ``"recompute"``, or one of them for each stage.
      grad_dtype: the dtype in which gradients are accumulated; by default each parameter's own.

    Raises:
      PipelineError: for a wrong ``residuals``.
    """
    modes = [residuals] * len(groups) if isinstance(residuals, str) else list(residuals)
    if len(modes) != len(groups) or any(m not in RESIDUALS for m in modes):
        raise PipelineError(
            f"residuals={residuals!r}: give one of {', '.join(map(repr, RESIDUALS))}, or a list "
            f"with one of them for each of the {len(groups)} stages; this has {len(modes)}."
        )
    seeds = dict(seeds or {})
    dtype = None if grad_dtype is None else jnp.dtype(grad_dtype)
    cuts = cut(traced, groups)
    cache = TemplateCache()
    planned: list[_Planned] = []
    # For each variable on an edge, the stages that send its gradient back, the last first: the
    # order in which reverse mode adds them.
    senders: dict[Any, list[int]] = {}
    for stage in reversed(cuts):
        plan = _plan_stage(traced, stage, senders, seeds, modes[stage.index], dtype, cache)
        for e in plan.template.grad_edges:
            senders.setdefault(stage.edges[e], []).append(stage.index)
        planned.append(plan)
    planned.reverse()
    return _join(traced, planned)


def _plan_stage(
    traced: Traced,
    stage: StageCut,
    senders: dict[Any, list[int]],
    seeds: dict[int, float],
    mode: str,
    grad_dtype: Any,
    cache: TemplateCache,
) -> _Planned:
    flat = traced.flat
    outs = (*stage.sends, *(a for _, a in stage.outputs))
    prologue = split_prologue(stage.eqns, outs, traced.depends, stage.edges)
    num_params = len(traced.param_avals)
    source = StageSource(
        params=tuple(flat.invars[i] for i in stage.params),
        constants=stage.constants,
        batch=tuple(flat.invars[num_params + i] for i in stage.batch),
        edges=stage.edges,
        prologue=prologue,
        outs=outs,
    )
    residents = source.residents
    used = {a for e in prologue.rest for a in e.invars if is_var(a)}
    used.update(a for a in outs if is_var(a))
    cotangents_from = tuple(
        tuple(senders.get(v, ())) if k < len(stage.sends) else () for k, v in enumerate(outs)
    )
    offset = len(stage.sends)
    wishes = Wishes(
        residents=tuple(
            i for i, v in enumerate(residents) if v in used and carries_gradient(traced, v)
        ),
        edges=tuple(i for i, v in enumerate(stage.edges) if carries_gradient(traced, v)),
        readers=tuple(map(len, cotangents_from)),
        seeds=tuple(
            (offset + k, seeds[position])
            for k, (position, _) in enumerate(stage.outputs)
            if position in seeds
        ),
        residuals=mode,
        grad_dtype=grad_dtype,
    )
    return _Planned(stage, source, cache.get(source, wishes), cotangents_from)


class _Values:
    """The values of the graph as they are named: id, description, arrays."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.bundles: list[tuple[Any, ...]] = []
        self.ids: dict[tuple[int, Slot], int] = {}

    def add(
        self,
        at: tuple[int, Slot],
        name: str,
        avals: Sequence[Any],
        producer: Pass,
        readers: Sequence[Pass],
        *,
        reusable: bool = False,
        kept: bool = False,
    ) -> None:
        self.ids[at] = len(self.values)
        size = sum(map(nbytes, avals))
        self.values.append(Value(name, size, producer, tuple(readers), reusable, kept))
        self.bundles.append(tuple(avals))


def _join(traced: Traced, planned: Sequence[_Planned]) -> StageGraph:
    named = _Values()
    outputs: dict[int, tuple[int, int]] = {}
    # Where each variable on an edge is made: (stage, slot).
    made: dict[Any, tuple[int, Slot]] = {}
    for p in planned:
        made.update((v, (p.cut.index, ("out", k))) for k, v in enumerate(p.cut.sends))
    for p in planned:
        s, template = p.cut.index, p.template
        slot: Slot

        def own(slot: Slot, s: int = s, template: Template = template) -> list[Pass]:
            return [(s, kind) for kind in template.readers.get(slot, ())]

        for k, v in enumerate(p.cut.sends):
            readers = [r for q in planned[s + 1 :] for r in _edge_readers(q, v)]
            name = f"output {k} of stage {s}" if len(p.cut.sends) > 1 else f"output of stage {s}"
            named.add((s, ("out", k)), name, [v.aval], (s, "F"), readers + own(("out", k)))
        for j, (position, atom) in enumerate(p.cut.outputs):
            slot = ("out", len(p.cut.sends) + j)
            name = f"result {position} of the loss function"
            named.add((s, slot), name, [atom.aval], (s, "F"), own(slot), kept=True)
            outputs[position] = (named.ids[s, slot], 0)
        for slot, avals in template.bundles.items():
            producer = "I" if slot[0] == "kept" else "F"
            name = f"{'values kept for W' if producer == 'I' else 'residuals'} of stage {s}"
            named.add((s, slot), name, avals, (s, producer), own(slot))
        for k, senders in enumerate(p.cotangents_from):
            for j, sender in enumerate(senders):
                slot = ("cotangent", k, j)
                name = f"cotangent from stage {sender} of output {k} of stage {s}"
                backward = template.passes.get("B")
                reusable = backward is not None and slot in backward.reusable
                aval = p.cut.sends[k].aval
                named.add((s, slot), name, [aval], (sender, "I"), own(slot), reusable=reusable)

    stages = tuple(_stage(traced, p, made, planned, named) for p in planned)
    empty = {(st.index, kind) for st in stages for kind in ("F", "I", "W") if kind not in st.passes}
    graph = Graph(
        stages=len(planned),
        values=tuple(named.values),
        gradient_nbytes=tuple(sum(map(nbytes, st.accumulator_avals)) for st in stages),
        empty=frozenset(empty),
        lines=tuple(st.lines for st in stages),
    )
    return StageGraph(
        stages=stages,
        graph=graph,
        bundles=tuple(named.bundles),
        outputs=tuple(outputs[i] for i in range(len(outputs))),
        param_avals=traced.param_avals,
        batch_avals=traced.batch_avals,
    )


def _edge_readers(p: _Planned, v: Any) -> list[Pass]:
    if v not in p.cut.edges:
        return []
    slot = ("edge", p.cut.edges.index(v))
    kinds = [*(["F"] if slot in p.template.passes["F"].reads else []),
             *p.template.readers.get(slot, ())]  # fmt: skip
    return [(p.cut.index, kind) for kind in kinds]


def _stage(
    traced: Traced,
    p: _Planned,
    made: dict[Any, tuple[int, Slot]],
    planned: Sequence[_Planned],
    named: _Values,
) -> Stage:
    s, template = p.cut.index, p.template

    def value_id(slot: Slot) -> int:
        if slot[0] == "edge":
            return named.ids[made[p.cut.edges[slot[1]]]]
        if slot[0] == "grad":  # a cotangent of the stage that made the edge
            maker, out = made[p.cut.edges[slot[1]]]
            reader = planned[maker].cotangents_from[out[1]].index(s)
            return named.ids[maker, ("cotangent", out[1], reader)]
        return named.ids[s, slot]

    passes = {}
    for kind, t in template.passes.items():
        if kind == "F" and not t.writes and not t.program.jaxpr.jaxpr.eqns:
            continue
        passes[kind] = PassSpec(
            program=t.program,
            resident=t.residents,
            batch=tuple(p.cut.batch[i] for i in t.batch),
            reads=tuple(map(value_id, t.reads)),
            writes=tuple(map(value_id, t.writes)),
            accumulators=t.accumulators,
            reusable=tuple(map(value_id, t.reusable)),
        )
    params = [v.aval for v in p.source.params]
    constants = [v.aval for v in p.source.constants]
    arrays = (*(traced.flat.constants[v] for v in p.cut.constants), *template.constants)
    results = [v.aval for v in p.source.prologue.results]
    return Stage(
        index=s,
        lines=source_range(p.cut.eqns),
        segments=p.cut.segments,
        params=p.cut.params,
        constants=arrays,
        batch=p.cut.batch,
        prologue=template.prologue,
        resident_avals=(*params, *constants, *map(_aval_of, template.constants), *results),
        accumulate=template.bases,
        accumulator_avals=template.accumulator_avals,
        grad_params=tuple(p.cut.params[i] for i in template.grad_params),
        epilogue=template.epilogue,
        passes=passes,
        residual_nbytes=template.saved_nbytes,
        vjp_residual_nbytes=template.vjp_nbytes,
        param_nbytes=sum(map(nbytes, params)),
    )


def _aval_of(array: Any) -> Any:
    return jax.core.ShapedArray(array.shape, array.dtype)
