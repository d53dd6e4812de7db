"""Random graphs and random schedules for property tests, and what they mean said independently.

`needs` and `reads` restate the meaning of a `Graph` in a few lines of sets, so that the tests do
not lean on the code they test.
"""

from __future__ import annotations

from hypothesis import strategies as st

from jaxpipe.scheduling import Action, Graph, Schedule, Value


@st.composite
def graphs(draw, max_stages=4, edges=True):
    """Chains with gaps, skips, kept results, empty passes, odd residuals and sizes."""
    stages = draw(st.integers(1, max_stages))
    size = st.integers(0, 5)
    values, empty, gradients = [], set(), []
    for s in range(stages):
        if draw(st.booleans()) and s == 0:
            empty.add((s, "I"))
        elif draw(st.integers(0, 4)) == 0:
            empty.add((s, "W"))
        gradients.append(0 if (s, "W") in empty else draw(size))
    backward = {s: [(s, k) for k in "IW" if (s, k) not in empty] for s in range(stages)}

    def some(passes):
        chosen = draw(st.lists(st.sampled_from(passes), unique=True)) if passes else []
        return tuple(sorted(chosen, key=lambda of: "FIW".index(of[1])))

    for s in range(stages):
        for n in range(draw(st.integers(0, 2))):
            values.append(Value(f"residual {n} of {s}", draw(size), (s, "F"), some(backward[s])))
        if len(backward[s]) == 2 and draw(st.booleans()):
            values.append(Value(f"for W of {s}", draw(size), (s, "I"), ((s, "W"),)))
        if draw(st.integers(0, 3)) == 0:
            values.append(Value(f"result of {s}", draw(size), (s, "F"), (), kept=True))
    pairs = [(i, j) for j in range(stages) for i in range(j)] if edges else []
    for i, j in pairs:
        if draw(st.integers(0, 9)) >= (9 if j == i + 1 else 3):
            continue
        further = tuple((k, "F") for k in range(j + 1, stages) if draw(st.integers(0, 4)) == 0)
        kept = draw(st.integers(0, 9)) == 0
        own = some(backward[i])
        readers = ((j, "F"), *further, *own)
        values.append(Value(f"edge {i}->{j}", draw(size), (i, "F"), readers, kept=kept))
        for k in (j, *(reader[0] for reader in further)):
            if (k, "I") not in empty:
                cotangent = Value(
                    f"cotangent {k}->{i}",
                    draw(size),
                    (k, "I"),
                    some(backward[i]),
                    reusable=draw(st.booleans()),
                )
                values.append(cotangent)
    return Graph(
        stages,
        tuple(values),
        tuple(gradients),
        frozenset(empty),
        tuple(f"model.py:{s + 1}" for s in range(stages)),
    )


@st.composite
def complete(draw, graph, max_devices=3, max_microbatches=3):
    """(placement, M, actions): everything that has to run, each stage in B, or I and W, or both."""
    devices = draw(st.integers(1, max_devices))
    placement = tuple(draw(st.integers(0, devices - 1)) for _ in range(graph.stages))
    microbatches = draw(st.integers(1, max_microbatches))
    forward_only = draw(st.integers(0, 7)) == 0
    actions = []
    for s in range(graph.stages):
        for m in range(microbatches):
            kinds = "F" if forward_only else draw(st.sampled_from(["FB", "FIW"]))
            actions += [Action(s, kind, m) for kind in kinds]
    return devices, placement, microbatches, actions


def maker(of, microbatch, actions):
    """The action that does pass ``of`` of ``microbatch``, or None."""
    whole = Action(of[0], "B", microbatch)
    action = whole if of[1] != "F" and whole in actions else Action(*of, microbatch)
    return action if action in actions else None


def needs(graph, actions):
    """{(producer, reader)}: what has to be over before what."""
    pairs = set()
    for action in actions:
        if action.kind != "F":
            pairs.add((action._replace(kind="F"), action))
        if action.kind == "W":
            pairs.add((action._replace(kind="I"), action))
    for value in graph.values:
        for m in {action.microbatch for action in actions}:
            producer = maker(value.producer, m, actions)
            for reader in (maker(of, m, actions) for of in value.readers):
                if producer and reader and producer != reader:
                    pairs.add((producer, reader))
    return pairs


def reads(graph, actions):
    """{action: {value index}} without passes that are empty."""
    table = {action: set() for action in actions}
    for index, value in enumerate(graph.values):
        for m in {action.microbatch for action in actions}:
            producer = maker(value.producer, m, actions)
            for of in value.readers:
                reader = maker(of, m, actions)
                if of not in graph.empty and producer and reader and producer != reader:
                    table[reader].add(index)
    return table


@st.composite
def valid_schedules(draw, graph, **sizes):
    """A schedule that can be run: at each step some action whose needs are met is appended."""
    devices, placement, microbatches, actions = draw(complete(graph, **sizes))
    waiting = {action: set() for action in actions}
    for producer, reader in needs(graph, set(actions)):
        waiting[reader].add(producer)
    orders = [[] for _ in range(devices)]
    left, done = sorted(actions), set()
    while left:
        ready = [action for action in left if waiting[action] <= done]
        action = draw(st.sampled_from(ready))
        left.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Schedule(devices, graph.stages, microbatches, placement, orders, "random")


@st.composite
def shuffled_schedules(draw, graph, **sizes):
    """A complete schedule that may deadlock: a valid one with some actions moved."""
    schedule = draw(valid_schedules(graph, **sizes))
    orders = [list(order) for order in schedule.orders]
    for _ in range(draw(st.integers(0, 3))):
        order = draw(st.sampled_from(orders))
        if order:
            place = st.integers(0, len(order) - 1)
            order.insert(draw(place), order.pop(draw(place)))
    return Schedule(
        schedule.devices,
        schedule.stages,
        schedule.microbatches,
        schedule.placement,
        orders,
        "moved",
    )


@st.composite
def any_schedules(draw):
    """Structurally legal, otherwise anything: incomplete, misplaced, repeated."""
    devices, stages, microbatches = (draw(st.integers(1, 4)) for _ in range(3))
    action = st.builds(
        Action,
        st.integers(0, stages - 1),
        st.sampled_from("FBIW"),
        st.integers(0, microbatches - 1),
    )
    placement = [draw(st.integers(0, devices - 1)) for _ in range(stages)]
    orders = [draw(st.lists(action, max_size=6)) for _ in range(devices)]
    return Schedule(devices, stages, microbatches, placement, orders, draw(st.text(max_size=8)))
