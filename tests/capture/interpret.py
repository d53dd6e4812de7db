"""A slow, obvious executor of a `StageGraph`, for tests: no schedule, no devices, no plan.

All forwards in stage order, then all backwards in reverse order, either as B or as I then W.
"""

import weakref

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpipe.capture.ir import StageGraph


def call(program, args):
    assert [(a.shape, a.dtype) for a in program.jaxpr.in_avals] == [
        (jnp.shape(a), jnp.asarray(a).dtype if not hasattr(a, "dtype") else a.dtype) for a in args
    ]
    if program not in _COMPILED:
        _COMPILED[program] = jax.jit(jex.jaxpr_as_fun(program.jaxpr))
    return _COMPILED[program](*args)


_COMPILED = weakref.WeakKeyDictionary()


def run(graph: StageGraph, params, microbatches, *, split=()):
    """Returns (outputs of each microbatch, gradients per flat parameter: zeros where none).

    ``split``: the stages whose backward runs as I then W.
    """
    residents, accumulators = [], []
    for st in graph.stages:
        fixed = [*(params[i] for i in st.params), *st.constants]
        extra = call(st.prologue, fixed) if st.prologue else []
        residents.append([*fixed, *extra])
        accumulators.append([jnp.zeros(a.shape, a.dtype) for a in st.accumulator_avals])
        assert [a.shape for a in residents[-1]] == [a.shape for a in st.resident_avals]
    outputs = []
    for batch in microbatches:
        values = {}

        def execute(stage, kind, values=values, batch=batch):
            spec = stage.passes.get(kind)
            if spec is None:
                return
            args = list(accumulators[stage.index]) if spec.accumulators else []
            n = len(args)
            args += [residents[stage.index][i] for i in spec.resident]
            args += [batch[i] for i in spec.batch]
            for v in spec.reads:
                producer = graph.graph.values[v].producer
                assert v in values, (graph.graph.values[v].name, producer)
                readers = graph.graph.values[v].readers
                kinds = ("I", "W") if kind == "B" else (kind,)
                assert any((stage.index, k) in readers for k in kinds)
                args += values[v]
            results = call(spec.program, args)
            accumulators[stage.index][:n] = results[:n]
            for v in spec.writes:
                k = len(graph.bundles[v])
                values[v], n = results[n : n + k], n + k
                assert [(a.shape, a.dtype) for a in values[v]] == [
                    (a.shape, a.dtype) for a in graph.bundles[v]
                ]
            assert n == len(results)

        for st in graph.stages:
            execute(st, "F")
        outputs.append([values[v][k] for v, k in graph.outputs])
        for st in reversed(graph.stages):
            if st.index in split:
                execute(st, "I")
                execute(st, "W")
            else:
                execute(st, "B")
    grads = [None] * len(params)
    for st, acc in zip(graph.stages, accumulators, strict=True):
        if not st.grad_params:
            continue
        if st.epilogue is not None:
            fixed = residents[st.index][: len(st.params) + len(st.constants)]
            acc = call(st.epilogue, [*fixed, *acc])
        for i, g in zip(st.grad_params, acc, strict=True):
            grads[i] = g if grads[i] is None else grads[i] + g
    return outputs, [
        g if g is not None else jnp.zeros(p.shape, p.dtype)
        for g, p in zip(grads, params, strict=True)
    ]
