"""JAX's checks for NaN and infinity in the threads that run devices.

``with jax.debug_nans(True):`` holds in the thread that enters it alone, but the programs of a step
run in others.
"""

from __future__ import annotations

from collections.abc import Callable

import jax


def under_callers_checks(job: Callable[[], None]) -> Callable[[], None]:
    """``job``, to be run in another thread, under this thread's debug_nans and debug_infs."""
    nans, infs = (getattr(jax.config, f"jax_debug_{what}") for what in ("nans", "infs"))
    if not (nans or infs):
        return job

    def checked() -> None:
        with jax.debug_nans(nans), jax.debug_infs(infs):
            job()

    return checked
