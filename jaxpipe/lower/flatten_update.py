"""An update function as one list of equations, with where each of its values can be had.

`trace_update` traces ``update(state, grads, aux) -> (state, metrics)`` on abstract values;
`flatten_update` inlines its nested calls and says for each value on which *device* it is made and
in which *round* it is there at the earliest. Devices work in local phases 1, 2, ... and between
phases i and i+1 one home device joins scalars in home phase i (`Place`). A ``cond`` that reads
leaves of several devices is opened: its branches' equations carry a *guard*, and each of its
results becomes a step that chooses between the branches' values; whoever makes programs of the
steps puts a ``cond`` around those that it takes.

This file knows no programs, no shardings and no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.errors import PipelineError

ALL = -1
NEVER = math.inf

Atom = Any  # int (a value) | Literal

_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


class Place(NamedTuple):
    """Where and when a value can be had.

    ``device``: the one device that can make it, or `ALL`. ``local``: the first local phase in
    which it can be there. ``home``: the first home phase (`NEVER` for arrays of leaf size).
    ``small``: a scalar, or made of scalars only. ``joined``: home can make it by itself.
    """

    device: int
    local: float
    home: float
    small: bool
    joined: bool = True


@dataclass(frozen=True, eq=False)
class Step:
    """One equation on numbered values. ``place``: where and when it can run.

    ``guard``: the opened conds around it, as pairs (cond, branch). ``chooses``: this step is the
    result of that cond; its inputs are the branch index and one value for each branch.
    """

    equation: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    place: Place
    guard: tuple[tuple[int, int], ...] = ()
    chooses: int | None = None


@dataclass(frozen=True, eq=False)
class TracedUpdate:
    """A traced update: ``jaxpr`` on the flat leaves of (state, grads, aux).

    The first ``state_leaves`` inputs and outputs are those of the state; the others outputs are
    metrics. ``keys`` and ``paths`` name the inputs; ``metric_paths`` the metrics.
    """

    jaxpr: Any
    avals: tuple[Any, ...]
    keys: tuple[tuple[Any, ...], ...]
    paths: tuple[str, ...]
    state_leaves: int
    metrics: Any  # a treedef
    metric_paths: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Flattened:
    """Steps in traced order. Values 0..n-1 are the inputs; ``constants`` maps values to arrays.

    ``indices[c]``: the atom that says which of ``branches[c]`` branches of the opened cond ``c`` is
    taken.
    """

    inputs: int
    outputs: tuple[Atom, ...]
    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    places: tuple[Place, ...]
    constants: dict[int, Any]
    indices: tuple[Atom, ...]
    branches: tuple[int, ...]


def trace_update(update: Callable, state: Any, grads: Any, aux: Any) -> TracedUpdate:
    """Trace ``update`` on abstract values (arrays or `jax.ShapeDtypeStruct`).

    Raises `PipelineError` when it does not return ``(state, metrics)`` with the same state tree,
    shapes and dtypes.
    """
    args = (state, grads, aux)
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(args)
    # make_jaxpr caches by function identity: a fresh function each time.
    traced: Any = jax.make_jaxpr(
        lambda *leaves: update(*treedef.unflatten(leaves)), return_shape=True
    )
    jaxpr, out = traced(*(leaf for _, leaf in flat))
    if not (isinstance(out, tuple) and len(out) == 2):
        raise PipelineError(
            "an update function must return (state, metrics); this one returned "
            f"{type(out).__name__}. Return the new state first and a dict (or any tree) of "
            "metrics second, which may be empty."
        )
    _check_state(state, out[0])
    names = ("state", "grads", "aux")
    keystr = jax.tree_util.keystr
    inner, _ = compat.parts(jaxpr)
    metrics, metrics_tree = jax.tree_util.tree_flatten_with_path(out[1])
    return TracedUpdate(
        jaxpr=jaxpr,
        avals=tuple(v.aval for v in inner.invars),
        keys=tuple(keys for keys, _ in flat),
        paths=tuple(names[keys[0].idx] + keystr(keys[1:]) for keys, _ in flat),
        state_leaves=len(jax.tree.leaves(state)),
        metrics=metrics_tree,
        metric_paths=tuple("metrics" + keystr(keys) for keys, _ in metrics),
    )


def _check_state(old: Any, new: Any) -> None:
    before = {jax.tree_util.keystr(k): a for k, a in jax.tree_util.tree_leaves_with_path(old)}
    after = {jax.tree_util.keystr(k): a for k, a in jax.tree_util.tree_leaves_with_path(new)}
    lost, gained = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    trees: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    if lost or gained or trees[0] != trees[1]:
        which = f" lost: {', '.join(lost[:5])}." if lost else ""
        which += f" gained: {', '.join(gained[:5])}." if gained else ""
        which = which or f" {jax.tree.structure(old)} became {jax.tree.structure(new)}."
        raise PipelineError(
            f"the update returns a state of another structure than it was given;{which} "
            "Return the same tree with new values."
        )
    for path, a in before.items():
        b = after[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise PipelineError(
                f"the update changes state{path} from {a.dtype}{list(a.shape)} to "
                f"{b.dtype}{list(b.shape)}; a state leaf keeps its shape and dtype. Cast the new "
                f"value, for example with .astype({str(a.dtype)!r})."
            )


def flatten_update(traced: TracedUpdate, owners: Sequence[int]) -> Flattened:
    """Inline nested calls, open conds that join devices, and place every value.

    ``owners``: for each flat input a device or `ALL`. Raises `PipelineError` where an equation
    joins arrays (not scalars) of several devices.
    """
    flattener = _Flattener(traced, owners)
    return flattener.result()


class _Flattener:
    def __init__(self, traced: TracedUpdate, owners: Sequence[int]):
        self.traced = traced
        self.owners = owners
        self.steps: list[Step] = []
        self.avals: list[Any] = []
        self.places: list[Place] = []
        self.constants: dict[int, Any] = {}
        self.indices: list[Atom] = []
        self.branches: list[int] = []
        jaxpr, consts = compat.parts(traced.jaxpr)
        env: dict[Any, Atom] = {}
        for var, owner in zip(jaxpr.invars, owners, strict=True):
            env[var] = self.value(var.aval, _input_place(var.aval, owner))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, const)
        self.walk(jaxpr, env, ())
        self.outputs = tuple(_read(env, a) for a in jaxpr.outvars)

    def result(self) -> Flattened:
        return Flattened(
            inputs=len(self.traced.avals),
            outputs=self.outputs,
            steps=tuple(self.steps),
            avals=tuple(self.avals),
            places=tuple(self.places),
            constants=self.constants,
            indices=tuple(self.indices),
            branches=tuple(self.branches),
        )

    def value(self, aval: Any, place: Place) -> int:
        self.avals.append(aval)
        self.places.append(place)
        return len(self.avals) - 1

    def constant(self, var: Any, array: Any) -> int:
        number = self.value(var.aval, Place(ALL, 1, 1, True))
        self.constants[number] = array
        return number

    def walk(self, jaxpr: Any, env: dict[Any, Atom], guard: tuple[tuple[int, int], ...]) -> None:
        for eqn in jaxpr.eqns:
            inputs = tuple(_read(env, a) for a in eqn.invars)
            if eqn.primitive.name in _CALLS:
                results = self.call(_called(eqn), inputs, guard)
            elif eqn.primitive.name == "cond" and not isinstance(inputs[0], int):
                results = self.call(eqn.params["branches"][int(inputs[0].val)], inputs[1:], guard)
            elif eqn.primitive.name == "cond" and self.joins_devices(inputs):
                results = self.open_cond(eqn, inputs, guard)
            else:
                results = self.step(eqn, inputs, [v.aval for v in eqn.outvars], guard)
            env.update(zip(eqn.outvars, results, strict=True))

    def call(self, closed: Any, inputs: Sequence[Atom], guard: Any) -> list[Atom]:
        jaxpr, consts = compat.parts(closed)
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, const)
        self.walk(jaxpr, env, guard)
        return [_read(env, a) for a in jaxpr.outvars]

    def joins_devices(self, inputs: Sequence[Atom]) -> bool:
        return len({self.places[a].device for a in inputs if isinstance(a, int)} - {ALL}) > 1

    def open_cond(self, eqn: Any, inputs: tuple[Atom, ...], guard: Any) -> list[Atom]:
        number = len(self.indices)
        self.indices.append(inputs[0])
        self.branches.append(len(eqn.params["branches"]))
        branches = [
            self.call(branch, inputs[1:], (*guard, (number, b)))
            for b, branch in enumerate(eqn.params["branches"])
        ]
        results: list[Atom] = []
        for var, *values in zip(eqn.outvars, *branches, strict=True):
            results += self.step(eqn, (inputs[0], *values), [var.aval], guard, chooses=number)
        return results

    def step(
        self,
        eqn: Any,
        inputs: tuple[Atom, ...],
        avals: Sequence[Any],
        guard: tuple[tuple[int, int], ...],
        *,
        chooses: int | None = None,
    ) -> list[Atom]:
        if any(map(compat.is_ordered, eqn.effects)):
            raise PipelineError(
                f"the update has an ordered effect ({eqn.primitive.name} at "
                f"{compat.source_line(eqn)}); it runs on several devices, which have no common "
                "order. Use the unordered form (ordered=False)."
            )
        read = [a for a in inputs if isinstance(a, int)]
        read += [i for c, _ in guard if isinstance(i := self.indices[c], int)]
        place = _join([self.places[a] for a in read])
        if place is None:
            raise PipelineError(self.refusal(eqn, read))
        results = tuple(self.value(aval, _output_place(aval, place)) for aval in avals)
        self.steps.append(Step(eqn, inputs, results, place, guard, chooses))
        return list(results)

    def refusal(self, eqn: Any, read: Sequence[int]) -> str:
        leaves: dict[int, list[str]] = {}
        for value in read:
            if not self.places[value].small:
                leaf = self.leaf_behind(value)
                paths = leaves.setdefault(self.places[value].device, [])
                if self.traced.paths[leaf] not in paths:
                    paths.append(self.traced.paths[leaf])
        where = "; ".join(
            f"device {d}: {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}"
            for d, paths in sorted(leaves.items())
        )
        return (
            f"the update joins arrays of several devices: {eqn.primitive.name} at "
            f"{compat.source_line(eqn)} reads {where}. Each leaf is updated on the device of its "
            "stage, and only scalars (norms, means, checks) may join leaves of different devices. "
            "Leave out what joins them (such as optax.flatten), reduce each leaf to a scalar "
            "first, or give these leaves to one stage."
        )

    def leaf_behind(self, value: int) -> int:
        """An input leaf of the value's device from which it is made."""
        makers = {v: step for step in self.steps for v in step.outputs}
        while value >= len(self.traced.avals):
            value = next(
                a
                for a in makers[value].inputs
                if isinstance(a, int)
                and self.places[a].device == self.places[value].device
                and not self.places[a].small
            )
        return value


def _called(eqn: Any) -> Any:
    for name in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    raise AssertionError(f"a call without a jaxpr: {eqn.primitive.name}")


def _read(env: dict[Any, Atom], atom: Any) -> Atom:
    return atom if isinstance(atom, compat.Literal) else env[atom]


def _input_place(aval: Any, owner: int) -> Place:
    small = owner == ALL or aval.shape == ()
    return Place(owner, 1, 1 if small else NEVER, small, joined=owner == ALL)


def arrives(place: Place, device: int) -> float:
    """The first local phase in which ``device`` can have the value."""
    return place.local if place.device in (ALL, device) else place.home + 1


def _join(inputs: Sequence[Place]) -> Place | None:
    """The place of what is made of the inputs (before its shape is known), None if impossible."""
    arrays = {p.device for p in inputs if not p.small}
    devices = {p.device for p in inputs} - {ALL}
    if len(devices) > 1 and not arrays:
        # What home has joined can be sent anywhere: a scalar leaf's own device makes what is
        # made of it, so that its equations stay in one program.
        devices = {p.device for p in inputs if not (p.joined and p.home < p.local)} - {ALL}
    if len(arrays) > 1:
        return None
    home = max((p.home for p in inputs), default=1) if not arrays else NEVER
    if arrays or len(devices) == 1:
        (device,) = arrays or devices
        local = max((arrives(p, device) for p in inputs), default=1)
    elif devices:  # scalars of several devices
        device, local = ALL, home + 1
    else:
        device, local = ALL, max((arrives(p, ALL) for p in inputs), default=1)
    return Place(device, local, home, not arrays, joined=not arrays)


def _output_place(aval: Any, place: Place) -> Place:
    if aval.shape != ():
        return place
    return place._replace(small=True, home=min(place.home, place.local))
