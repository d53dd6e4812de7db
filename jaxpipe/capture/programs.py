"""Programs of one stage, by position: differentiated and split once for all stages that are equal.

A `Template` holds the programs of a stage and says how their arguments and results are made up, in
terms of positions in the stage's own lists of residents, batch leaves, edges and outs. Stages with
equal fingerprints share one template; `build.py` ties templates into a `StageGraph`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import primitives as prims

from jaxpipe.capture import _jax_compat as compat
from jaxpipe.capture._jax_compat import Atom, Equation, Var
from jaxpipe.capture.differentiate import Body, Joint, differentiate
from jaxpipe.capture.dtypes import accumulator_dtype
from jaxpipe.capture.equal import fingerprint
from jaxpipe.capture.flat import close, is_var
from jaxpipe.capture.flops import flops
from jaxpipe.capture.ir import Program
from jaxpipe.capture.prologue import Split, before_casts, epilogue_jaxpr
from jaxpipe.capture.split import Partition, split

# A thing that outlives a pass, by position: ("edge", i), ("out", k), ("residual", bundle number),
# ("kept", 0), ("cotangent", k, reader), ("grad", edge).
Slot = tuple


@dataclass(frozen=True)
class PassTemplate:
    """A pass's program; what it takes and gives, as positions and slots in order."""

    program: Program
    residents: tuple[int, ...]
    batch: tuple[int, ...]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    accumulators: bool
    reusable: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Template:
    """The programs of a stage and of all stages equal to it.

    ``bundles``: the avals of the residual bundles, and of what I keeps for W. ``readers``: for each
    slot that is not a gradient, the kinds among I and W that read it. ``grad_edges``: edges that
    receive gradients. ``bases``: per accumulator, the position in the resident list it belongs to.
    ``constants``: arrays that differentiation closed over (the last of the stage's constants).
    """

    passes: dict[str, PassTemplate]
    bundles: dict[Slot, tuple[Any, ...]]
    readers: dict[Slot, tuple[str, ...]]
    grad_edges: tuple[int, ...]
    bases: tuple[int, ...]
    accumulator_avals: tuple[Any, ...]
    prologue: Program | None
    epilogue: Program | None
    grad_params: tuple[int, ...]
    constants: tuple[Any, ...]
    saved_nbytes: int
    vjp_nbytes: int


@dataclass(frozen=True)
class StageSource:
    """What a template is made of: a stage's own variables and equations."""

    params: tuple[Var, ...]
    constants: tuple[Var, ...]
    batch: tuple[Var, ...]
    edges: tuple[Var, ...]
    prologue: Split
    outs: tuple[Atom, ...]

    @property
    def residents(self) -> tuple[Var, ...]:
        return (*self.params, *self.constants, *self.prologue.results)


@dataclass(frozen=True)
class Wishes:
    """What is asked of a stage's backward.

    ``residents`` and ``edges``: positions that may need a gradient. ``readers[k]``: how many
    cotangents arrive for out k. ``seeds``: known cotangents by out. ``grad_dtype``: of the
    accumulators (None: the parameter's own).
    """

    residents: tuple[int, ...]
    edges: tuple[int, ...]
    readers: tuple[int, ...]
    seeds: tuple[tuple[int, float], ...]
    residuals: str
    grad_dtype: Any


@dataclass
class TemplateCache:
    """Templates by the fingerprint of the stage's forward, and programs by that of the joint.

    The second catches stages that hold custom derivative functions, whose rules JAX gives a new
    identity at each call: their joint programs, where the rules are inlined, compare equal.
    """

    templates: dict[Hashable, Template] = field(default_factory=dict)
    by_joint: dict[Hashable, Template] = field(default_factory=dict)

    def get(self, source: StageSource, wishes: Wishes) -> Template:
        inputs = [*source.params, *source.constants, *source.batch, *source.edges]
        sizes = tuple(map(len, (source.params, source.constants, source.batch, source.edges)))
        eqns = [*source.prologue.once, *source.prologue.rest]
        forward_key = (
            sizes,
            len(source.prologue.once),
            fingerprint(inputs, eqns, [*source.prologue.results, *source.outs]),
            wishes,
        )
        if forward_key not in self.templates:
            self.templates[forward_key] = self._make(source, wishes, sizes)
        return self.templates[forward_key]

    def _make(self, source: StageSource, wishes: Wishes, sizes: tuple[int, ...]) -> Template:
        body = Body(source.residents, source.batch, source.edges, source.prologue.rest, source.outs)
        joint = differentiate(
            body,
            residents=wishes.residents,
            edges=wishes.edges,
            readers=wishes.readers,
            seeds=dict(wishes.seeds),
        )
        inputs = [*joint.residents, *joint.batch, *joint.edges, *joint.cotangents.values()]
        once_inputs = [*source.params, *source.constants]
        grads = [*joint.resident_grads.values(), *joint.edge_grads.values()]
        joint_key = (
            sizes,
            fingerprint(once_inputs, source.prologue.once, source.prologue.results),
            fingerprint([*inputs, *joint.constants], joint.eqns, [*joint.outs, *grads]),
            tuple(map(id, joint.constants.values())),
            tuple(joint.resident_grads),
            tuple(joint.edge_grads),
            wishes,
        )
        if joint_key not in self.by_joint:
            self.by_joint[joint_key] = make_template(source, joint, wishes)
        return self.by_joint[joint_key]


def make_template(source: StageSource, joint: Joint, wishes: Wishes) -> Template:
    """Split the joint program and close each pass's program over its arguments."""
    partition = split(joint, wishes.residuals)
    names = _Names(joint, partition, wishes)
    gradients = _accumulate(source, joint, wishes)
    passes: dict[str, PassTemplate] = {}
    grad_edges = tuple(joint.edge_grads)
    for kind, eqns in partition.eqns.items():
        writes: list[Slot] = []
        if kind == "F":
            writes = [("out", k) for k in range(len(joint.outs))] + list(names.residual_slots)
        elif kind in ("B", "I"):
            writes = [("grad", e) for e in grad_edges]
            if kind == "I" and partition.kept:
                writes.append(("kept", 0))
        weights = gradients if kind in ("B", "W") and gradients.bases else None
        passes[kind] = _close_pass(kind, eqns, writes, names, weights, joint, source)
    if partition.whole is not None:
        passes[partition.whole] = passes["B"]
    prologue = epilogue = None
    once = source.prologue.once
    grad_params = gradients.bases
    extra = [compat.new_var(v.aval) for v in joint.constants]  # arguments of every program
    if once:
        inputs = [*source.params, *source.constants, *extra]
        prologue = Program("prologue", close(inputs, once, source.prologue.results), flops(once))
    if gradients.bases:
        body, grad_params = epilogue_jaxpr(
            source.params,
            [*source.constants, *extra],
            once,
            gradients.base_vars,
            gradients.avals,
            wishes.grad_dtype,
        )
        if body is not None:
            epilogue = Program("epilogue", body, flops(body.jaxpr.eqns))
    return Template(
        passes=passes,
        bundles=names.bundles,
        readers=names.readers,
        grad_edges=grad_edges,
        bases=tuple(_resident_position(i, joint, source) for i in gradients.bases),
        accumulator_avals=gradients.avals,
        prologue=prologue,
        epilogue=epilogue,
        grad_params=grad_params,
        constants=tuple(joint.constants.values()),
        saved_nbytes=partition.saved_nbytes,
        vjp_nbytes=partition.vjp_nbytes,
    )


@dataclass(frozen=True)
class _Gradients:
    """Per accumulator: its base (a resident position, a variable), and the gradients added."""

    bases: tuple[int, ...]
    base_vars: tuple[Var, ...]
    avals: tuple[Any, ...]
    terms: tuple[tuple[Atom, ...], ...]


def _accumulate(source: StageSource, joint: Joint, wishes: Wishes) -> _Gradients:
    residents = source.residents
    position: dict[Var, int] = {}
    terms: dict[Var, list[Atom]] = {}
    for i, grad in joint.resident_grads.items():
        base = before_casts(residents[i], source.prologue.once)
        position.setdefault(base, residents.index(base) if base in residents else i)
        terms.setdefault(base, []).append(grad)
    avals = tuple(
        jax.core.ShapedArray(b.aval.shape, accumulator_dtype(b.aval.dtype, wishes.grad_dtype))
        for b in terms
    )
    return _Gradients(
        tuple(position[b] for b in terms), tuple(terms), avals, tuple(map(tuple, terms.values()))
    )


def _resident_position(i: int, joint: Joint, source: StageSource) -> int:
    """From a position in (joint residents, joint constants) to one in the stage's resident list.

    The list is (params, constants of the cut, constants of the joint, prologue results).
    """
    fixed = len(source.params) + len(source.constants)
    if i < fixed:
        return i
    if i < len(joint.residents):
        return i + len(joint.constants)
    return fixed + i - len(joint.residents)


class _Names:
    """Slots of the variables that outlive a pass, and how residuals are bundled by readers."""

    def __init__(self, joint: Joint, partition: Partition, wishes: Wishes):
        self.slot: dict[Var, Slot] = {}
        self.bundles: dict[Slot, tuple[Any, ...]] = {}
        self.members: dict[Slot, list[Var]] = {}
        self.readers: dict[Slot, tuple[str, ...]] = {}
        reads = partition.reads

        def reading(v: Var) -> tuple[str, ...]:
            return tuple(k for k in ("I", "W") if k in reads and v in reads[k])

        self._seed_values = {
            joint.cotangents[k, wishes.readers[k]]: value for k, value in wishes.seeds
        }
        for i, v in enumerate(joint.edges):
            self._single(v, ("edge", i), reading(v))
        for k, a in enumerate(joint.outs):
            if is_var(a) and a not in self.slot and a not in joint.batch:
                if a in joint.residents or a in joint.constants:
                    continue
                self._single(a, ("out", k), reading(a))
        for (k, j), v in joint.cotangents.items():
            if v not in self._seed_values:
                self._single(v, ("cotangent", k, j), reading(v))
        groups: dict[tuple[str, ...], list[Var]] = {}
        fallback = tuple(k for k in ("W", "I") if k in reads)[:1]
        for v in partition.saved:
            if v not in self.slot:
                groups.setdefault(reading(v) or fallback, []).append(v)
        self.residual_slots: list[Slot] = []
        for number, (kinds, members) in enumerate(sorted(groups.items())):
            slot = ("residual", number)
            self.residual_slots.append(slot)
            self._bundle(members, slot, kinds)
        if partition.kept:
            self._bundle(list(partition.kept), ("kept", 0), ("W",))

    def _single(self, v: Var, slot: Slot, readers: tuple[str, ...]) -> None:
        self.slot[v] = slot
        self.members[slot] = [v]
        self.readers[slot] = readers

    def _bundle(self, members: list[Var], slot: Slot, readers: tuple[str, ...]) -> None:
        self.bundles[slot] = tuple(v.aval for v in members)
        self.members[slot] = members
        self.readers[slot] = readers
        self.slot.update(dict.fromkeys(members, slot))

    def read_by(self, kind: str, partition_reads: frozenset[Var]) -> list[Slot]:
        """The slots that a pass of this kind takes, in one fixed order."""
        if kind == "F":
            edges = ((s, m[0]) for s, m in self.members.items() if s[0] == "edge")
            return [s for s, v in edges if v in partition_reads]
        wanted = ("I", "W") if kind == "B" else (kind,)
        return [
            s
            for s, kinds in self.readers.items()
            if any(k in kinds for k in wanted) and not (kind == "B" and s[0] == "kept")
        ]

    @property
    def seeds(self) -> dict[Var, float]:
        return self._seed_values


def _close_pass(
    kind: str,
    eqns: Sequence[Equation],
    writes: Sequence[Slot],
    names: _Names,
    gradients: _Gradients | None,
    joint: Joint,
    source: StageSource,
) -> PassTemplate:
    eqns = list(eqns)
    results: list[Atom] = []
    for slot in writes:
        if slot[0] == "out":
            results.append(joint.outs[slot[1]])
        elif slot[0] == "grad":
            results.append(joint.edge_grads[slot[1]])
        else:
            results.extend(names.members[slot])
    accumulators: list[Var] = []
    if gradients is not None:
        sums: list[Atom] = []
        for aval, terms in zip(gradients.avals, gradients.terms, strict=True):
            total: Var = compat.new_var(aval)
            accumulators.append(total)
            for term in terms:
                if term.aval.dtype != aval.dtype:
                    cast = compat.cast(term, aval.dtype)
                    eqns.append(cast)
                    term = cast.outvars[0]
                add = compat.new_equation(prims.add_p, [total, term], {}, aval)
                eqns.append(add)
                total = add.outvars[0]
            sums.append(total)
        results = [*sums, *results]
    seeds = {v: compat.literal(x, v.aval) for v, x in names.seeds.items()}
    eqns = [e.replace(invars=[seeds.get(a, a) if is_var(a) else a for a in e.invars]) for e in eqns]
    results = [seeds.get(a, a) if is_var(a) else a for a in results]
    used = {a for e in eqns for a in e.invars if is_var(a)} | {a for a in results if is_var(a)}
    all_residents = [*joint.residents, *joint.constants]
    residents = [i for i, v in enumerate(all_residents) if v in used]
    batch = [i for i, v in enumerate(joint.batch) if v in used]
    reads = names.read_by(kind, frozenset(used))
    arguments = [
        *accumulators,
        *(all_residents[i] for i in residents),
        *(joint.batch[i] for i in batch),
        *(v for s in reads for v in names.members[s]),
    ]
    program = Program(kind, close(arguments, eqns, results), flops(eqns))
    return PassTemplate(
        program=program,
        residents=tuple(_resident_position(i, joint, source) for i in residents),
        batch=tuple(batch),
        reads=tuple(reads),
        writes=tuple(writes),
        accumulators=gradients is not None,
        reusable=_reusable(reads, writes, joint) if kind in "BI" else (),
    )


def _reusable(reads: Sequence[Slot], writes: Sequence[Slot], joint: Joint) -> tuple[Slot, ...]:
    """Cotangents whose buffers can take an input gradient of the same shape and dtype."""
    open_results = [
        (joint.edge_grads[s[1]].aval.shape, joint.edge_grads[s[1]].aval.dtype)
        for s in writes
        if s[0] == "grad"
    ]
    found = []
    for slot in reads:
        if slot[0] == "cotangent":
            aval = joint.cotangents[slot[1], slot[2]].aval
            if (aval.shape, aval.dtype) in open_results:
                open_results.remove((aval.shape, aval.dtype))
                found.append(slot)
    return tuple(found)
