"""What goes back, whoever asked."""

from dataclasses import dataclass

from qkv.errors import QKVError
from qkv.serving.frame import as_json

JSON, FRAME, FRAMES = "application/json", "application/x-qkv-frame", "application/x-qkv-frames"


@dataclass(frozen=True)
class Answer:
    status: int
    type: str
    body: bytes
    filename: str | None = None
    """Of a file to download."""


class RefusedError(QKVError):
    """No answer but one line, with HTTP's number for its kind."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


def refusal(error: QKVError) -> Answer:
    status = error.status if isinstance(error, RefusedError) else 400
    return Answer(status, JSON, as_json({"error": " ".join(str(error).split())}))
