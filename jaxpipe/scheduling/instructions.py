"""Instruction lists: what each device does in one step, transfers and frees included.

`plan` turns a checked `Schedule` and a `Graph` into one list per device. Every transfer stands in
both devices' lists, put there by one topological order of the whole step directly after its
producer, so that sends and receives that block until both are reached always finish. A value is
freed right after its last reader (or, when the reader's program reuses its buffers, by the `Run`
itself). Counting the bytes held between Run or Recv and Free gives the live bytes of each device
exactly, in list order.

Values are named by their index in ``graph.values`` and the microbatch. This file knows no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.scheduling.actions import Action
from jaxpipe.scheduling.graph import Graph, graph_or_chain
from jaxpipe.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Run:
    """Run the program of ``action``; afterwards its outputs are held.

    ``reuse``: values (of the action's microbatch) whose buffers the program overwrites: they are
    gone when the Run is done and no Free follows. ``accumulate``: for B and W, whether the program
    adds its weight gradients to the stage's accumulator (its turn in microbatch order has come),
    or leaves them as a pending gradient for a later `Accumulate`.
    """

    action: Action
    reuse: tuple[int, ...] = ()
    accumulate: bool = True


@dataclass(frozen=True, slots=True)
class Send:
    """Hand ``value`` of ``microbatch`` to device ``to``. The sender goes on holding it."""

    value: int
    microbatch: int
    to: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Take ``value`` of ``microbatch`` from device ``source``; it is held from here on."""

    value: int
    microbatch: int
    source: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the pending weight gradients of (stage, microbatch) to the accumulator, and free them."""

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop ``value`` of ``microbatch`` on this device."""

    value: int
    microbatch: int


Instruction = Run | Send | Recv | Accumulate | Free


@dataclass(frozen=True, eq=False)
class Plan:
    """One instruction list per device, and what follows from the lists alone.

    ``walk``: every instruction once as (device, index), in an order in which a single thread can
    execute them all; a Send and its Recv are neighbours in it. ``live``: for each instruction the
    bytes that its device holds afterwards (in the unit of the graph), without what stays for the
    whole step. ``peaks``: the most of these, by device. ``links``: the pairs (source, destination)
    that transfers use, in the order of their first use.
    """

    schedule: Schedule
    graph: Graph
    lists: tuple[tuple[Instruction, ...], ...]
    walk: tuple[tuple[int, int], ...]
    live: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]
    links: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """The lists for people: one line per instruction with the bytes held after it."""
        lines = []
        for device, (instructions, live) in enumerate(zip(self.lists, self.live, strict=True)):
            lines.append(f"device {device}, peak {self.peaks[device]}")
            for instruction, held in zip(instructions, live, strict=True):
                lines.append(f"  {_say(instruction, self.graph):60} {held:>12}")
        return "\n".join(lines)


def _say(instruction: Instruction, graph: Graph) -> str:
    match instruction:
        case Run(action, reuse, accumulate):
            text = f"run {action}"
            if reuse:
                text += f", reusing {', '.join(graph.values[v].name for v in reuse)}"
            return text if accumulate else f"{text}, gradient pending"
        case Send(value, microbatch, to):
            return f"send {graph.values[value].name} [{microbatch}] to device {to}"
        case Recv(value, microbatch, source):
            return f"receive {graph.values[value].name} [{microbatch}] from device {source}"
        case Accumulate(stage, microbatch):
            return f"accumulate the gradient of stage {stage} [{microbatch}]"
        case Free(value, microbatch):
            return f"free {graph.values[value].name} [{microbatch}]"


def plan(schedule: Schedule, graph: Graph | None = None, *, accumulate: str = "index") -> Plan:
    """Turn each device's order into instructions, transfers and frees included.

    ``graph``: a chain if none is given. ``accumulate``: ``"index"`` adds the weight gradients of a
    stage in ascending microbatch order, whatever the order of its backwards (a gradient that comes
    early is held until its turn); ``"arrival"`` adds them as they come. A pass that the graph calls
    empty gets no instruction. Raises `ScheduleError` as `check` does.

    >>> print(plan(Schedule.parse("0F0 0B0\\n1F0 1B0")))
    device 0, peak 1
      run 0F0                                                                 1
      send output of stage 0 [0] to device 1                                  1
      free output of stage 0 [0]                                              1
      receive cotangent of stage 0's output [0] from device 1                 1
      run 0B0                                                                 1
      free activations of stage 0 [0]                                         0
      free cotangent of stage 0's output [0]                                  0
    device 1, peak 1
      receive output of stage 0 [0] from device 0                             0
      run 1F0                                                                 1
      free output of stage 0 [0]                                              1
      run 1B0                                                                 1
      free activations of stage 1 [0]                                         0
      send cotangent of stage 0's output [0] to device 0                      0
      free cotangent of stage 0's output [0]                                  0
    """
    from jaxpipe.scheduling.check import check
    from jaxpipe.scheduling.planning import make_plan

    graph = graph_or_chain(graph, schedule.stages)
    check(schedule, graph)
    return make_plan(schedule, graph, accumulate)
