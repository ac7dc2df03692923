"""Exception hierarchy. All exceptions that the library raises derive from `QKVError`."""

MAX_MESSAGE_CHARACTERS = 2_000
"""Maximum length of an error message. Longer messages are shortened because they may quote long values from files."""


class QKVError(Exception):
    """Base class for all errors that the caller can fix. Each message is a single line of limited length."""

    def __str__(self) -> str:
        message = " ".join(super().__str__().splitlines())
        return message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:1_400]} … {message[-500:]}"


class ConfigError(QKVError):
    """Raised for invalid or contradictory settings."""


class ShapeError(QKVError):
    """Raised when a tensor has an unexpected shape."""


class InputError(QKVError):
    """Raised for invalid input, such as ids, a text, a file or a name."""


class ContextLengthError(InputError):
    """Raised when a sequence is longer than the model's context length."""


class KVCacheError(QKVError):
    """Raised when a KV cache is full or belongs to another batch or model."""


class TapError(QKVError):
    """Raised when a tap name or pattern matches nothing, or an intervention does not fit the tapped tensor."""


class AttentionEdgeNotReachedError(TapError):
    """Raised when an attention edge that should be masked did not occur in any forward pass."""


class WeightsError(QKVError):
    """Raised when weights cannot be read or do not match the model."""


class MissingExtraError(QKVError):
    """Raised when an optional dependency is not installed."""


class TrainingError(QKVError):
    """Raised when training cannot continue, for example because the loss is NaN or the data is exhausted."""


class RunError(QKVError):
    """Raised when a run folder cannot be written to or resumed from."""


class DiskError(QKVError):
    """Raised when a disk is full, read-only or failing.

    The message contains the path and the number of bytes required and available.
    """
