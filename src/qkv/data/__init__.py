"""Text files to token stores to batches.

The names here need no torch; the batches themselves are in `qkv.data.windows`, which does.
"""

from qkv.data.documents import read_documents, read_texts
from qkv.data.order import Permutation
from qkv.data.prefetch import prefetch
from qkv.data.prepare import is_unfinished, prepare_store
from qkv.data.sources import find_sources
from qkv.data.store import StorePart, TokenSource, TokenStore

__all__ = [
    "Permutation",
    "StorePart",
    "TokenSource",
    "TokenStore",
    "find_sources",
    "is_unfinished",
    "prefetch",
    "prepare_store",
    "read_documents",
    "read_texts",
]
