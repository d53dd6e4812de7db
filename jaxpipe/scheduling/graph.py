"""`Graph`: the neutral form of a stage graph, what passes hand to one another and how big it is.

A *pass* is a pair ``(stage, kind)`` with kind ``F``, ``I`` or ``W``: what an action does, without
its microbatch. A *value* is a bundle of arrays that one pass makes and others read, once for each
microbatch: the activations on an edge, the residuals that a forward saves, a cotangent, what an
``I`` keeps for its ``W``. Where a schedule runs a stage's backward as one ``B``, that ``B`` stands
for both ``I`` and ``W`` and values from the one to the other do not exist.

This file knows no arrays and no jax; `jaxpipe.capture` makes a `Graph` of a traced model, and
`Graph.chain` makes the one that is assumed when there is no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpipe.errors import ScheduleError

Pass = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Value:
    """A bundle of arrays that one pass makes and other passes read, per microbatch.

    ``nbytes`` counts the whole bundle (or any unit of memory). ``readers`` may be on other stages
    (an edge) and may be several. ``reusable`` marks a cotangent whose buffers a B or an I that is
    its last reader may overwrite (donation). ``kept`` marks results of the step (losses, aux): they
    are never freed within it.
    """

    name: str
    nbytes: int
    producer: Pass
    readers: tuple[Pass, ...]
    reusable: bool = False
    kept: bool = False


@dataclass(frozen=True)
class Graph:
    """Stages and the values that flow between their passes.

    ``gradient_nbytes[s]`` is the size of stage s's weight gradients of one microbatch (held only
    where a schedule's backwards of a stage run out of microbatch order). ``empty`` lists passes
    without work, such as ``(0, "I")``. ``lines[s]`` says where stage s is in the model's source.
    """

    stages: int
    values: tuple[Value, ...]
    gradient_nbytes: tuple[int, ...] = ()
    empty: frozenset[Pass] = field(default_factory=frozenset)
    lines: tuple[str, ...] = ()

    @classmethod
    def chain(cls, stages: int, *, activation: int = 1, edge: int = 0) -> Graph:
        """The graph assumed without a model: each stage feeds the next.

        One stage's activations of one microbatch count ``activation`` from its F to its W (or B),
        and what crosses an edge (forward and backward) counts ``edge`` where it is held.

        >>> Graph.chain(2).edges
        ((0, 1),)
        """
        values = [
            Value(f"activations of stage {s}", activation, (s, "F"), ((s, "I"), (s, "W")))
            for s in range(stages)
        ]
        for s in range(stages - 1):
            values.append(Value(f"output of stage {s}", edge, (s, "F"), ((s + 1, "F"),)))
            values.append(
                Value(f"cotangent of stage {s}'s output", edge, (s + 1, "I"), ((s, "I"), (s, "W")))
            )
        return cls(stages, tuple(values), (0,) * stages)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs (i, j) where stage j's forward reads what stage i's forward made."""
        pairs = {
            (v.producer[0], stage)
            for v in self.values
            if v.producer[1] == "F"
            for stage, kind in v.readers
            if kind == "F" and stage != v.producer[0]
        }
        return tuple(sorted(pairs))


def graph_or_chain(graph: object, stages: int) -> Graph:
    """``graph``, or a chain for None. Raises `ScheduleError` for anything else."""
    if graph is None:
        return Graph.chain(stages)
    if not isinstance(graph, Graph):
        raise ScheduleError(
            f"graph is a jaxpipe.scheduling.Graph, such as Graph.chain({stages}), not {graph!r}."
        )
    return graph
