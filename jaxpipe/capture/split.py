"""Split: a joint program -> the programs of the passes F, B, I and W, and what is kept between.

What needs no cotangent is F; of the rest, what the gradients of the stage's inputs need is I; what
is left is W; I and W together are B. Between F and the backward, and between I and W, `min_cut`
chooses what is saved and what is cheaply recomputed. No pass repeats dear work of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.capture._jax_compat import Equation, Var
from jaxpipe.capture.differentiate import Joint, gate_p
from jaxpipe.capture.flat import is_var, nbytes, substitute
from jaxpipe.capture.recompute import Choice, is_cheap, min_cut

RESIDUALS = ("min_cut", "vjp", "recompute")


@dataclass(frozen=True)
class Partition:
    """Which equations each pass runs, and the variables handed from pass to pass.

    ``saved``: made by F or an edge into the stage, held for the backward. ``kept``: made by I for
    W. ``reads[kind]``: of the variables that outlive a pass (edges, outs, saved, kept,
    cotangents), those that the pass reads. ``whole``: where the stage has no input gradients, or
    no weight gradients, the one of W and I that is all of B; the other has nothing to do, and both
    are missing in ``eqns``.
    """

    eqns: dict[str, tuple[Equation, ...]]
    saved: tuple[Var, ...]
    kept: tuple[Var, ...]
    whole: str | None = None
    reads: dict[str, frozenset[Var]] = field(default_factory=dict)
    saved_nbytes: int = 0
    vjp_nbytes: int = 0


def split(joint: Joint, residuals: str) -> Partition:
    """Assign the equations of a joint program to passes.

    ``residuals``: ``"min_cut"`` (fewest bytes, only cheap work repeated), ``"vjp"`` (what
    `jax.vjp` saves) or ``"recompute"`` (only the stage's inputs; its forward runs again).
    """
    return _Splitter(joint, residuals).partition()


class _Splitter:
    """The maps over one joint program that the cuts share."""

    def __init__(self, joint: Joint, residuals: str):
        self.joint = joint
        self.residuals = residuals
        self.maker = {v: e for e in joint.eqns for v in e.outvars}
        self.order = {id(e): i for i, e in enumerate(joint.eqns)}
        self.free = {*joint.residents, *joint.batch, *joint.constants}
        self.edges = set(joint.edges)
        self.backward = joint.backward
        self.cotangents = set(joint.cotangents.values())

    def partition(self) -> Partition:
        joint = self.joint
        weight_grads = [g for g in joint.resident_grads.values() if is_var(g)]
        input_grads = [g for g in joint.edge_grads.values() if is_var(g)]
        effects = [e for e in joint.eqns if e.effects]
        early = [e for e in effects if not self._is_backward(e)]
        late = [e for e in effects if self._is_backward(e)]
        grads = [*weight_grads, *input_grads]

        everything = self._closure(grads, set(), late)
        back = [e for e in everything if self._is_backward(e)]
        needed = dict.fromkeys(u for e in back for u in self._operands(e) if u not in self.backward)
        needed.update((g, None) for g in grads if g not in self.backward)
        saved = self._save_for_backward(list(needed))
        frontier = [v for v in needed if v not in self.free]

        eqns: dict[str, list[Equation]] = {}
        computed = [v for v in saved if v not in self.edges]
        eqns["F"] = self._closure([*joint.outs, *computed], set(), early)
        kept: list[Var] = []
        whole = None
        if grads:
            eqns["B"] = self._closure(grads, saved, late)
            if not input_grads:
                whole = "W"
            elif not weight_grads:
                whole = "I"
            else:
                first = self._closure(input_grads, saved, late)
                held = self._save_for_weights(weight_grads, first, saved)
                ready = saved | self.cotangents | self.edges
                kept = [v for v in held if v not in ready]
                eqns["I"] = self._closure([*input_grads, *kept], saved, late)
                eqns["W"] = self._closure(weight_grads, held, ())
        roots = {
            "F": [*joint.outs, *computed],
            "B": grads,
            "I": [*input_grads, *kept],
            "W": weight_grads,
        }
        reads = {kind: self._outside(eqns[kind], roots[kind]) for kind in eqns}
        if whole is not None:
            reads[whole] = reads["B"]
        return Partition(
            eqns={k: tuple(_drop_gates(e)) for k, e in eqns.items()},
            saved=tuple(self._in_order(saved)),
            kept=tuple(self._in_order(kept)),
            whole=whole,
            reads=reads,
            saved_nbytes=sum(nbytes(v.aval) for v in saved),
            vjp_nbytes=sum(nbytes(v.aval) for v in frontier),
        )

    # What each cut may do.

    def _save_for_backward(self, needed: Sequence[Var]) -> set[Var]:
        if self.residuals == "vjp":
            return {v for v in needed if v not in self.free}
        if self.residuals == "recompute":
            eqns = self._closure(needed, set(), ())
            return {u for e in eqns for u in e.invars if is_var(u) and u in self.edges} | {
                v for v in needed if v in self.edges
            }
        return min_cut(
            needed,
            self.maker,
            self._operands,
            Choice(
                free=self.free.__contains__,
                given=self.edges.__contains__,
                savable=lambda v: True,
                recomputable=is_cheap,
            ),
        )

    def _save_for_weights(
        self, weight_grads: Sequence[Var], first: Sequence[Equation], saved: set[Var]
    ) -> set[Var]:
        """What W reads: of the residuals, the cotangents, and what I computed."""
        in_first = {id(e) for e in first}
        rest = [e for e in self._closure(weight_grads, saved, ()) if id(e) not in in_first]
        mine = {v for e in rest for v in e.outvars}
        needed = dict.fromkeys(u for e in rest for u in self._operands(e) if u not in mine)
        needed.update((g, None) for g in weight_grads if g not in mine)
        there = saved | self.cotangents | self.edges
        made_first = {v for e in first for v in e.outvars}
        return min_cut(
            list(needed),
            self.maker,
            self._operands,
            Choice(
                free=self.free.__contains__,
                given=lambda v: v in self.edges or v in self.cotangents,
                savable=lambda v: v in there or (v in made_first and not self._is_gate(v)),
                recomputable=lambda e: is_cheap(e) or e.primitive is gate_p,
            ),
        )

    # Small walks over the joint program.

    def _is_backward(self, eqn: Equation) -> bool:
        return any(is_var(a) and a in self.backward for a in eqn.invars)

    def _is_gate(self, var: Var) -> bool:
        return var in self.maker and self.maker[var].primitive is gate_p

    def _operands(self, eqn: Equation) -> list[Var]:
        """What an equation really reads: a gate only its first operand."""
        reads = eqn.invars[:1] if eqn.primitive is gate_p else eqn.invars
        return [a for a in reads if is_var(a)]

    def _closure(
        self, roots: Iterable[Any], available: set[Var], extra: Sequence[Equation]
    ) -> list[Equation]:
        """The equations that make ``roots`` of what is ``available`` (and inputs), in order."""
        chosen: dict[int, Equation] = {}
        todo = [r for r in roots if is_var(r) and r not in available]
        for e in extra:
            chosen[id(e)] = e
            todo.extend(u for u in self._operands(e) if u not in available)
        while todo:
            eqn = self.maker.get(todo.pop())
            if eqn is None or id(eqn) in chosen:
                continue
            chosen[id(eqn)] = eqn
            todo.extend(u for u in self._operands(eqn) if u not in available)
        return sorted(chosen.values(), key=lambda e: self.order[id(e)])

    def _outside(self, eqns: Sequence[Equation], roots: Iterable[Any]) -> frozenset[Var]:
        made = {v for e in eqns for v in e.outvars}
        reads = {u for e in eqns for u in self._operands(e)}
        reads.update(r for r in roots if is_var(r))
        return frozenset(reads - made)

    def _in_order(self, variables: Iterable[Var]) -> list[Var]:
        place = {v: i for i, v in enumerate([*self.joint.edges, *self.maker])}
        return sorted(variables, key=lambda v: place[v])


def _drop_gates(eqns: Sequence[Equation]) -> list[Equation]:
    env: dict[Var, Any] = {}
    kept = []
    for eqn in eqns:
        if eqn.primitive is gate_p:
            (out,), source = eqn.outvars, eqn.invars[0]
            env[out] = env.get(source, source)
        else:
            kept.extend(substitute([eqn], env))
    return kept
