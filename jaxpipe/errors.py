"""The two errors that users of jaxpipe see."""


class ScheduleError(ValueError):
    """A schedule is malformed, incomplete, misplaced, deadlocks, or does not fit in memory."""


class PipelineError(ValueError):
    """A model, a batch, a mesh or a call cannot be pipelined as asked."""
