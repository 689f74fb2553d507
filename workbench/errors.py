"""Typed errors of the workbench: what was got and what is allowed, in one sentence.

Wrong input is a `ValueError` subclass, raised at the boundary where the value came in. Conditions that a well-behaved
caller meets at run time (a full queue, no free row, a closed stream) are `RuntimeError` subclasses to be caught by type.
The command line prints any of them without a traceback.
"""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """Base of every error about something the user supplied; the command line turns it into exit code 2."""


class ConfigError(InputError):
    """A configuration key or value that is not allowed; names the dotted path, the value and what is allowed."""


class DeviceMemoryError(ConfigError):
    """A configuration that needs more memory than the device has free."""


class AudioError(InputError):
    """An audio file or a manifest line that cannot be used.

    path: the file; line: the 1-based manifest line it came from (None for a plain file); reason: what is wrong.
    """

    def __init__(self, path: str | Path, reason: str, line: int | None = None) -> None:
        self.path, self.reason, self.line = str(path), reason, line
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {reason}")


class ModelError(InputError):
    """A model that cannot be loaded, or that lacks what a streaming transducer needs."""


class RecordError(InputError):
    """A result record or a profiler trace that cannot be read, or whose numbers would be wrong if printed."""


class GeneratorLagged(RecordError):
    """A paced run whose own load generator was late: nothing was measured, and the recogniser is not to blame."""


class LoadNotCarried(RecordError):
    """A paced run that was refused work or fell too far behind: the configuration does not carry that many streams."""


class StudyError(InputError):
    """A tuning study that cannot be run as described."""


class QueueFull(RuntimeError):
    """The bounded queue is full; the work was not accepted and may be submitted again later."""


class ArenaFull(RuntimeError):
    """Every state row is taken; no stream can be opened until one is finished or cancelled."""


class StreamClosed(RuntimeError):
    """The stream, or the recogniser it belongs to, was finished, cancelled or shut down."""


class StepTimeout(RuntimeError):
    """A wait reached its bound; the work may still complete."""
