"""One host thread per device, kept from call to call.

XLA runs small CPU programs on the thread that calls them, and a dispatch blocks while a device's
queue is full: with a thread for each device, devices work at once. The threads are daemons; they
end when their `Workers` is closed, collected as garbage, or when the interpreter exits. This file
knows nothing of what the threads run.

Several callers may submit at once. The jobs of one `submit` reach all devices before those of the
next: jobs that wait for one another on different devices would else wait for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """Threads 0..n-1, each with a queue of jobs that it runs in order.

    A job deals with its own exceptions. Threads start with the first `submit`.

    >>> done = SimpleQueue()
    >>> workers = Workers(2)
    >>> workers.submit([lambda: done.put("a"), lambda: done.put("b")])
    >>> sorted([done.get(), done.get()])
    ['a', 'b']
    >>> workers.close()
    """

    def __init__(self, count: int) -> None:
        self._inboxes: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._inboxes, self._threads)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand job i to thread i; returns at once."""
        with self._lock:
            self._start()
            for inbox, job in zip(self._inboxes, jobs, strict=True):
                inbox.put(job)

    def submit_to(self, number: int, job: Job) -> None:
        """Hand a job to one thread; returns at once."""
        with self._lock:
            self._start()
            self._inboxes[number].put(job)

    def settle(self) -> None:
        """Wait until every job that was submitted is over.

        A KeyboardInterrupt meanwhile is raised when that is so.
        """
        interrupt: KeyboardInterrupt | None = None
        over = [threading.Event() for _ in self._inboxes]
        waiting = True
        while waiting:
            try:
                with self._lock:
                    self._start()
                    for inbox, event in zip(self._inboxes, over, strict=True):
                        inbox.put(event.set)  # behind what was submitted; twice does no harm
                for event in over:
                    event.wait()
                waiting = False
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def serves(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one of these."""
        return thread in self._threads

    def close(self) -> None:
        """End the threads after the jobs they hold."""
        self._finalizer()

    def _start(self) -> None:
        """Start the threads that have not been started."""
        if len(self._threads) == len(self._inboxes):
            return
        if not self._finalizer.alive:
            raise RuntimeError("these workers are closed")
        for number in range(len(self._threads), len(self._inboxes)):
            thread = threading.Thread(
                target=_serve,
                args=(self._inboxes[number],),
                name=f"jaxpipe device {number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)


def _serve(inbox: SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job  # a waiting thread holds no arrays


def _stop(inboxes: list[SimpleQueue[Job | None]], threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=10.0)
