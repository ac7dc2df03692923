"""Exception hierarchy. All exceptions raised by the library derive from `QKVError`."""

MAX_MESSAGE_CHARACTERS = 2_000
"""Maximum length of an error message. Messages may quote arbitrarily long values from files."""


class QKVError(Exception):
    """Base class of all errors that the caller can fix. The message is a single line of limited length."""

    def __str__(self) -> str:
        message = " ".join(super().__str__().splitlines())
        return message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:1_400]} … {message[-500:]}"


class ConfigError(QKVError):
    """Invalid or contradictory settings."""


class ShapeError(QKVError):
    """A tensor with an unexpected shape."""


class InputError(QKVError):
    """Invalid input from outside the library, such as ids, a text, a file or a name."""


class ContextLengthError(InputError):
    """A sequence that is longer than the context length of the model."""


class KVCacheError(QKVError):
    """A KV cache that is full or belongs to another batch or model."""


class TapError(QKVError):
    """A tap name or pattern that matches nothing, or an intervention that does not fit the tapped tensor."""


class AttentionEdgeNotReachedError(TapError):
    """An attention edge to be masked that was not part of any forward pass."""


class WeightsError(QKVError):
    """Weights that do not match the model."""


class MissingExtraError(QKVError):
    """A missing optional dependency."""


class TrainingError(QKVError):
    """A training run that cannot continue, for example because the loss is NaN or the data are exhausted."""


class RunError(QKVError):
    """A run folder that cannot be written to or resumed from."""


class DiskError(QKVError):
    """A disk that is full, read-only or failing. The message contains the path and the bytes required and available."""
