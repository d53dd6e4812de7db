"""Transports: how a value gets from one device to another, once for each microbatch.

A transfer is keyed by (value, microbatch, source, destination), never by arrival order, and has a
`Channel` of its own. Both ends are walked by different threads, each at its own pace:

- the sender *offers* its arrays, and before it frees them waits until they have been *released*;
- the receiver *posts* a receive slot at its planned place, and *takes* the arrays where they are
  first read.

Whoever comes second moves the arrays. So nobody waits earlier than he must, a sender is never more
than the planned receive slots ahead, and every wait here also is a wait of the blocking model that
`jaxpipe.scheduling` has proved free of deadlock. This file knows no stages and no actions.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from queue import SimpleQueue
from typing import Any, Protocol

import jax


class Cancelled(Exception):
    """Raised in a device's thread when another device has failed."""


class Channel(Protocol):
    """One transfer, used once per step."""

    def offer(self, arrays: list[jax.Array]) -> None:
        """Sender: the arrays are ready to be moved. Does not wait."""

    def released(self) -> None:
        """Sender: wait until the arrays have been moved and may be freed."""

    def post(self) -> None:
        """Receiver: a slot for the arrays is free. Does not wait."""

    def take(self) -> list[jax.Array]:
        """Receiver: wait for the arrays."""


class Transport(Protocol):
    """Makes the channels of one compiled pipeline, and can break off all of them at once."""

    def channel(self, key: Hashable, sharding: Any) -> Channel:
        """The channel of one transfer to arrays under ``sharding``; equal keys, equal channel."""

    def cancel(self) -> None:
        """Raise `Cancelled` in every thread that waits in a channel, now or later."""

    def reset(self) -> None:
        """Make all channels fresh after a step that was broken off."""


class DevicePutTransport:
    """Transfers within one process, by `jax.device_put`."""

    def __init__(self) -> None:
        self._channels: dict[Hashable, _DevicePutChannel] = {}

    def channel(self, key: Hashable, sharding: Any) -> _DevicePutChannel:
        if key not in self._channels:
            self._channels[key] = _DevicePutChannel(sharding)
        return self._channels[key]

    def cancel(self) -> None:
        for channel in self._channels.values():
            channel.cancel()

    def reset(self) -> None:
        for channel in self._channels.values():
            channel.reset()


class _DevicePutChannel:
    __slots__ = ("_arrays", "_arrived", "_first", "_left", "_sharding")

    def __init__(self, sharding: Any) -> None:
        self._sharding = sharding
        self.reset()

    def reset(self) -> None:
        self._first = threading.Lock()  # taken by the end that comes first, given back by the other
        self._arrived: SimpleQueue[list[jax.Array] | None] = SimpleQueue()
        self._left: SimpleQueue[bool] = SimpleQueue()
        self._arrays: list[jax.Array] | None = None

    def offer(self, arrays: list[jax.Array]) -> None:
        self._arrays = arrays
        if not self._first.acquire(blocking=False):
            self._move()

    def post(self) -> None:
        if not self._first.acquire(blocking=False):
            self._move()

    def take(self) -> list[jax.Array]:
        arrays = self._arrived.get()
        if arrays is None:
            raise Cancelled
        return arrays

    def released(self) -> None:
        if not self._left.get():
            raise Cancelled

    def cancel(self) -> None:
        self._arrived.put(None)
        self._left.put(False)

    def _move(self) -> None:
        self._first.release()
        arrays, self._arrays = self._arrays, None
        self._arrived.put(jax.device_put(arrays, self._sharding))
        self._left.put(True)
