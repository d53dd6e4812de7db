"""From a part of an update to a function of flat arrays.

A part's arguments are, in order: leaves of the update's inputs, arrays kept by earlier parts, and
packed vectors of scalars, one for each sender and dtype. Its results: outputs of the update, arrays
to keep, and its own packed vectors. `signature` describes a part up to the numbering of its values:
parts of equal signature (equal stages) share one function and are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.lower.flatten_update import Atom, Flattened, Step
from jaxpipe.lower.rounds import Part

Vector = tuple[int, int, Any]  # (place, phase, dtype): the packed scalars of one part


@dataclass(frozen=True, eq=False)
class Signature:
    """Arguments and results of a part.

    ``vectors``: the packed vectors it reads, and ``offsets`` where in them each scalar stands, as
    (value, index in ``vectors``, position). ``packed``: the scalars of each vector it makes.
    """

    leaves: tuple[int, ...]
    kept: tuple[int, ...]
    vectors: tuple[Vector, ...]
    offsets: tuple[tuple[int, int, int], ...]
    outputs: tuple[Atom, ...]
    keeps: tuple[int, ...]
    packed: tuple[tuple[Any, tuple[int, ...]], ...]


def packed(flat: Flattened, part: Part) -> dict[Any, tuple[int, ...]]:
    """The scalars that a part sends, by dtype."""
    dtypes = list(dict.fromkeys(flat.avals[v].dtype for v in part.scalars))
    return {
        dtype: tuple(v for v in part.scalars if flat.avals[v].dtype == dtype) for dtype in dtypes
    }


def sign(flat: Flattened, part: Part, parts: dict[tuple[int, int], Part]) -> Signature:
    """The signature of ``part``; ``parts`` holds all parts by place and phase."""
    leaves = [v for v, source in part.reads if source is None]
    kept, vectors, offsets = [], list[Vector](), []
    for value, source in part.reads:
        if source is None:
            continue
        if flat.avals[value].shape != ():
            kept.append(value)
            continue
        dtype = flat.avals[value].dtype
        vector = (*source, dtype)
        if vector not in vectors:
            vectors.append(vector)
        position = packed(flat, parts[source])[dtype].index(value)
        offsets.append((value, vectors.index(vector), position))
    return Signature(
        tuple(leaves),
        tuple(kept),
        tuple(vectors),
        tuple(offsets),
        tuple(atom for _, atom in part.results),
        part.kept,
        tuple(packed(flat, part).items()),
    )


def fingerprint(flat: Flattened, part: Part, signature: Signature) -> Hashable:
    """Equal for parts that compute the same function of their arguments."""
    numbers: dict[int, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, int):
            if atom in flat.constants:
                return ("constant", id(flat.constants[atom]))
            return numbers.setdefault(atom, len(numbers))
        return ("literal", str(atom.aval), repr(atom.val))

    def names(atoms: Sequence[Atom]) -> Hashable:
        return tuple(name(a) for a in atoms)

    conds: dict[int, int] = {}
    arguments = tuple((name(v), str(flat.avals[v])) for v in (*signature.leaves, *signature.kept))
    scalars = tuple((name(v), *where) for v, *where in signature.offsets)
    dtypes = tuple(str(dtype) for *_, dtype in signature.vectors)
    steps = []
    for number in part.steps:
        step = flat.steps[number]
        guard = tuple(
            (conds.setdefault(c, len(conds)), branch, flat.branches[c], name(flat.indices[c]))
            for c, branch in step.guard
        )
        chooses = None if step.chooses is None else conds.setdefault(step.chooses, len(conds))
        what = "choose" if step.chooses is not None else _equation_key(step.equation)
        steps.append((what, names(step.inputs), guard, chooses, names(step.outputs)))
    results = (names(signature.outputs), names(signature.keeps))
    sent = tuple((str(dtype), names(values)) for dtype, values in signature.packed)
    return arguments, scalars, dtypes, tuple(steps), results, sent, names(part.pins)


def _equation_key(equation: Any) -> Hashable:
    params = []
    for key, value in equation.params.items():
        try:
            hash(value)
        except TypeError:
            value = (type(value), str(value))
        params.append((key, value))
    return equation.primitive, tuple(params), tuple(str(v.aval) for v in equation.outvars)


def part_function(flat: Flattened, part: Part, signature: Signature) -> Callable[..., list]:
    """The part as a function of its flat arguments."""
    exported = {*signature.keeps, *(v for _, values in signature.packed for v in values)}

    def run(*args: Any) -> list[Any]:
        env: dict[int, Any] = dict(flat.constants)
        leaves = [*signature.leaves, *signature.kept]
        env.update(zip(leaves, args[: len(leaves)], strict=True))
        vectors = args[len(leaves) :]
        for value, vector, position in signature.offsets:
            env[value] = _scalar(vectors[vector], position)
        _evaluate(flat, [flat.steps[n] for n in part.steps], 0, env, exported)
        results = [_read(env, a) for a in signature.outputs]
        results += [env[v] for v in signature.keeps]
        results += [jnp.stack([env[v] for v in values]) for _, values in signature.packed]
        return results + [jnp.broadcast_to(env[v], (2,)) for v in part.pins]

    return run


def _scalar(vector: Any, position: int) -> Any:
    return jax.lax.squeeze(jax.lax.slice_in_dim(vector, position, position + 1), (0,))


def _read(env: dict[int, Any], atom: Atom) -> Any:
    if isinstance(atom, int):
        return env[atom]
    return jnp.asarray(atom.val, atom.aval.dtype)


def _evaluate(
    flat: Flattened, steps: Sequence[Step], depth: int, env: dict[int, Any], exported: set[int]
) -> None:
    """Run the steps in ``env``; those inside an opened cond, ``depth`` conds deep, as a cond."""

    def cond_of(step: Step) -> int | None:
        return step.guard[depth][0] if len(step.guard) > depth else step.chooses

    for number, group in groupby(steps, cond_of):
        if number is None:
            for step in group:
                _bind(step, env)
        else:
            _evaluate_cond(flat, number, list(group), depth, env, exported)


def _bind(step: Step, env: dict[int, Any]) -> None:
    equation = step.equation
    params = equation.primitive.get_bind_params(equation.params)
    inputs = [env[a] if isinstance(a, int) else a.val for a in step.inputs]
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **params)
    if not equation.primitive.multiple_results:
        results = [results]
    env.update(zip(step.outputs, results, strict=True))


def _evaluate_cond(
    flat: Flattened,
    number: int,
    steps: Sequence[Step],
    depth: int,
    env: dict[int, Any],
    exported: set[int],
) -> None:
    """A cond around what this part has of the opened cond ``number``.

    Beside the cond's own results, what is made inside a branch and leaves the part is a result
    too; the branches that do not make it give zeros, which nobody reads.
    """
    chosen = [s for s in steps if s.chooses == number and len(s.guard) == depth]
    inside = [s for s in steps if len(s.guard) > depth]
    leaving = [(v, s.guard[depth][1]) for s in inside for v in s.outputs if v in exported]

    def branch(which: int) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            mine = dict(env)
            _evaluate(
                flat, [s for s in inside if s.guard[depth][1] == which], depth + 1, mine, exported
            )
            return list(_results(mine))

        def _results(mine: dict[int, Any]) -> Iterator[Any]:
            for step in chosen:
                yield _read(mine, step.inputs[1 + which])
            for value, maker in leaving:
                aval = flat.avals[value]
                yield mine[value] if maker == which else jnp.zeros(aval.shape, aval.dtype)

        return run

    index = _read(env, flat.indices[number])
    results = jax.lax.switch(index, [branch(b) for b in range(flat.branches[number])])
    env.update(zip([s.outputs[0] for s in chosen] + [v for v, _ in leaving], results, strict=True))
