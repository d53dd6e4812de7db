"""Schedules as data: written, read, checked, planned and simulated, without jax.

An *action* is one pass of one stage on one microbatch; a `Schedule` is an order of actions for
each device; a `Graph` says what passes hand to one another.
"""

from jaxpipe.errors import ScheduleError
from jaxpipe.scheduling import placements
from jaxpipe.scheduling.actions import KINDS, Action
from jaxpipe.scheduling.check import check
from jaxpipe.scheduling.costs import Costs
from jaxpipe.scheduling.dsl import schedule
from jaxpipe.scheduling.graph import Graph, Pass, Value
from jaxpipe.scheduling.greedy import fastest, greedy
from jaxpipe.scheduling.instructions import (
    Accumulate,
    Free,
    Instruction,
    Plan,
    Recv,
    Run,
    Send,
    plan,
)
from jaxpipe.scheduling.kinds import B, F, I, Kind, LocalAction, W
from jaxpipe.scheduling.resolve import resolve
from jaxpipe.scheduling.schedule import Schedule
from jaxpipe.scheduling.schedule_function import ScheduleFunction
from jaxpipe.scheduling.simulate import simulate
from jaxpipe.scheduling.timeline import Timeline, Transfer

__all__ = [
    "KINDS",
    "Accumulate",
    "Action",
    "B",
    "Costs",
    "F",
    "Free",
    "Graph",
    "I",
    "Instruction",
    "Kind",
    "LocalAction",
    "Pass",
    "Plan",
    "Recv",
    "Run",
    "Schedule",
    "ScheduleError",
    "ScheduleFunction",
    "Send",
    "Timeline",
    "Transfer",
    "Value",
    "W",
    "check",
    "fastest",
    "greedy",
    "placements",
    "plan",
    "resolve",
    "schedule",
    "simulate",
]
