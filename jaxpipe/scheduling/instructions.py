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
