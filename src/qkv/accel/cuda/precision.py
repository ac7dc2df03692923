"""Run recurrent models in full float32 precision on a GPU."""

from threading import Lock

import torch


class CudnnTF32Disabled:
    """Reentrant context manager that disables TF32 in cuDNN, which would change the fourth digit of recurrent states.

    The setting is global. The first thread to enter disables TF32, and the last one to leave restores it.
    """

    def __init__(self) -> None:
        self._lock, self._n_inside, self._previous = Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                self._previous = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                torch.backends.cudnn.allow_tf32 = self._previous


CUDNN_TF32_DISABLED = CudnnTF32Disabled()
