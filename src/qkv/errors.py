"""Every deliberate exception, one small tree: catch `QKVError` to catch them all."""

MOST_CHARACTERS = 2_000
"""Of a message: a value from a file may have any length and lines; what is told of it stays one line, to be read."""


class QKVError(Exception):
    """Something the caller can mend; the message says what, with both numbers."""

    def __str__(self) -> str:
        whole = " ".join(super().__str__().splitlines())
        return whole if len(whole) <= MOST_CHARACTERS else f"{whole[:1_400]} … {whole[-500:]}"


class ConfigError(QKVError):
    """A setting that cannot be, or settings that contradict each other."""


class ShapeError(QKVError):
    """A tensor whose shape does not fit the part it was given to."""


class InputError(QKVError):
    """A value from outside (ids, text, a name) that the model or command cannot take."""


class ContextLengthError(InputError):
    """More tokens than the model has positions for."""


class CacheError(QKVError):
    """A cache that is full, or that belongs to another batch or model."""


class TapError(QKVError):
    """A tap name or pattern that matches nothing, or a change that does not fit the place."""


class WeightsError(QKVError):
    """Weights on disk or from elsewhere that do not fit the model."""


class MissingExtraError(QKVError):
    """An optional library that this feature needs is not installed."""


class TrainingError(QKVError):
    """A run that cannot go on: a loss or gradient that is no number, data that ran out."""


class RunError(QKVError):
    """A run folder that cannot be written, or that holds nothing to go on from."""


class DiskError(QKVError):
    """A disk that is full, read-only or failing; the message names the path, the bytes needed and free."""
