"""A stage graph written by hand: a chain of ``tanh(x @ w + b)``, squared error at the end.

It lets the runtime be tested without capture. `reference` is the same function in plain JAX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.capture.ir import PassSpec, Program, Stage, StageGraph
from jaxpipe.scheduling.graph import Graph, Value


def program(name, fun, *avals):
    return Program(name, jax.make_jaxpr(lambda *args: list(fun(*args)))(*avals))


def chain(stages: int, microbatches: int, *, width: int = 8, batch: int = 2) -> StageGraph:
    w, b, x, scalar = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((width, width), (width,), (batch, width), ())
    )
    size = batch * width * 4
    values: list[Value] = []
    bundles: list[tuple] = []

    def value(*args, avals, **options) -> int:
        nbytes = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in avals)
        values.append(Value(args[0], nbytes, *args[1:], **options))
        bundles.append(tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in avals))
        return len(values) - 1

    last = stages - 1
    out, kept, grad, through = {}, {}, {}, {}
    for s in range(stages):
        kept[s] = value(f"residuals of stage {s}", (s, "F"), ((s, "I"), (s, "W")), avals=(x,))
        if s < last:
            readers = ((s + 1, "F"), (s + 1, "W"))
            out[s] = value(f"output of stage {s}", (s, "F"), readers, avals=(x,))
            readers = ((s, "I"), (s, "W")) if s == 0 else ((s, "I"),)
            grad[s] = value(
                f"cotangent of stage {s}", (s + 1, "I"), readers, avals=(x,), reusable=s > 0
            )
        if s > 0:
            through[s] = value(f"from I to W of stage {s}", (s, "I"), ((s, "W"),), avals=(x,))
    loss = value("loss", (last, "F"), (), avals=(scalar,), kept=True)

    def forward(w, b, x):
        return jnp.tanh(x @ w + b)

    def head(y, target):
        return jnp.mean((y - target) ** 2)

    def back(y, ct):
        return ct * (1 - y * y)

    def back_head(y, target):
        return (1 - y * y) * jax.grad(head)(y, target) / microbatches

    middle = {
        "F": program("middle F", lambda w, b, x: [forward(w, b, x)] * 2, w, b, x),
        "I": program(
            "middle I", lambda w, y, ct: (back(y, ct) @ w.T, back(y, ct)), w, x, x
        ),
        "W": program("W", lambda aw, ab, x, dz: (aw + x.T @ dz, ab + dz.sum(0)), w, b, x, x),
        "B": program(
            "middle B",
            lambda aw, ab, w, x, y, ct: (
                aw + x.T @ back(y, ct),
                ab + back(y, ct).sum(0),
                back(y, ct) @ w.T,
            ),
            w, b, w, x, x, x,
        ),
    }  # fmt: skip
    made = []
    for s in range(stages):
        first, final = s == 0, s == last
        before = () if first else (out[s - 1],)
        passes = {}
        if not final:
            f = middle["F"]
            if first:
                passes["F"] = PassSpec(f, (0, 1), (0,), (), (kept[s], out[s]))
                wgrad = program(
                    "first W",
                    lambda aw, ab, x, y, ct: (aw + x.T @ back(y, ct), ab + back(y, ct).sum(0)),
                    w, b, x, x, x,
                )  # fmt: skip
                for kind in "WB":
                    passes[kind] = PassSpec(wgrad, (), (0,), (kept[s], grad[s]), (), True)
            else:
                passes["F"] = PassSpec(f, (0, 1), (), before, (kept[s], out[s]))
                passes["I"] = PassSpec(
                    middle["I"], (0,), (), (kept[s], grad[s]), (grad[s - 1], through[s]),
                    reusable=(grad[s],),
                )  # fmt: skip
                passes["W"] = PassSpec(middle["W"], (), (), (*before, through[s]), (), True)
                passes["B"] = PassSpec(
                    middle["B"], (0,), (), (*before, kept[s], grad[s]), (grad[s - 1],), True,
                    reusable=(grad[s],),
                )  # fmt: skip
        else:
            source = (0, 1) if first else (1,)

            def ends(fun):
                """``fun(w, b, x, target)`` or, where x comes from the batch, in batch order."""
                return fun

            passes["F"] = PassSpec(
                program(
                    "last F",
                    (lambda w, b, x, t: (forward(w, b, x), head(forward(w, b, x), t)))
                    if first
                    else (lambda w, b, t, x: (forward(w, b, x), head(forward(w, b, x), t))),
                    w, b, x, x,
                ),
                (0, 1), source, before, (kept[s], loss),
            )  # fmt: skip
            if first:
                wgrad = program(
                    "only W",
                    lambda aw, ab, x, t, y: (
                        aw + x.T @ back_head(y, t),
                        ab + back_head(y, t).sum(0),
                    ),
                    w, b, x, x, x,
                )  # fmt: skip
                for kind in "WB":
                    passes[kind] = PassSpec(wgrad, (), source, (kept[s],), (), True)
            else:
                passes["I"] = PassSpec(
                    program(
                        "last I",
                        lambda w, t, y: (back_head(y, t) @ w.T, back_head(y, t)),
                        w, x, x,
                    ),
                    (0,), (1,), (kept[s],), (grad[s - 1], through[s]),
                )  # fmt: skip
                passes["W"] = PassSpec(middle["W"], (), (), (*before, through[s]), (), True)
                passes["B"] = PassSpec(
                    program(
                        "last B",
                        lambda aw, ab, w, t, x, y: (
                            aw + x.T @ back_head(y, t),
                            ab + back_head(y, t).sum(0),
                            back_head(y, t) @ w.T,
                        ),
                        w, b, w, x, x, x,
                    ),
                    (0,), (1,), (*before, kept[s]), (grad[s - 1],), True,
                )  # fmt: skip
        avals = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in (w, b))
        made.append(
            Stage(
                index=s,
                lines=f"model.py:{s + 1}",
                segments=(s,),
                params=(2 * s, 2 * s + 1),
                constants=(),
                batch=(0, 1),
                prologue=None,
                resident_avals=avals,
                accumulate=(0, 1),
                accumulator_avals=avals,
                grad_params=(2 * s, 2 * s + 1),
                epilogue=None,
                passes=passes,
            )
        )
    batch_avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for _ in range(2))
    empty = frozenset({(0, "I")})
    graph = Graph(
        stages, tuple(values), (width * width * 4 + width * 4,) * stages, empty,
        tuple(s.lines for s in made),
    )  # fmt: skip
    assert size == values[kept[0]].nbytes
    return StageGraph(
        stages=tuple(made),
        graph=graph,
        bundles=tuple(bundles),
        outputs=((loss, 0),),
        param_avals=tuple(a for s in made for a in s.resident_avals),
        batch_avals=batch_avals,
    )


def arrays(stages: int, microbatches: int, *, width: int = 8, batch: int = 2):
    """Parameters (flat) and a batch (flat) for `chain`."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * stages + 2))
    params = []
    for _ in range(stages):
        params.append(jax.random.normal(next(keys), (width, width)) / np.sqrt(width))
        params.append(jax.random.normal(next(keys), (width,)))
    data = [jax.random.normal(next(keys), (batch * microbatches, width)) for _ in range(2)]
    return params, data


@jax.jit
def reference(params, batch):
    """Loss and gradients in plain JAX."""

    def fun(params):
        x = batch[0]
        for w, b in zip(params[::2], params[1::2], strict=True):
            x = jnp.tanh(x @ w + b)
        return jnp.mean((x - batch[1]) ** 2)

    return jax.value_and_grad(fun)(params)
