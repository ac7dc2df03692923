"""Prepare training data: read text files, tokenize them into stores on disk, and build batches.

The names exported here do not require torch, but the batch modules do.
"""

from qkv.data.documents import parse_text_sources, read_documents, read_text_chunks
from qkv.data.sampler import Permutation, prefetch
from qkv.data.token_store import TokenSource, TokenStore, TokenStoreSlice
from qkv.data.token_store_writer import is_unfinished, prepare_store

__all__ = [
    "Permutation",
    "TokenSource",
    "TokenStore",
    "TokenStoreSlice",
    "is_unfinished",
    "parse_text_sources",
    "prefetch",
    "prepare_store",
    "read_documents",
    "read_text_chunks",
]
