"""Train, load and save tokenizers, encode texts, and decode token streams."""

from qkv.text.tokenizer import (
    MAX_CHUNK_CHARACTERS,
    Encoding,
    StreamingDecoder,
    TokenByteSpan,
    Tokenizer,
    encode_texts,
    encode_truncated,
    split_into_chunks,
    stream_text,
)
from qkv.text.tokenizer_files import load_tokenizer, save_tokenizer, tokenizer_files
from qkv.text.tokenizer_trainer import END_OF_TEXT, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "MAX_CHUNK_CHARACTERS",
    "Encoding",
    "StreamingDecoder",
    "TokenByteSpan",
    "Tokenizer",
    "encode_texts",
    "encode_truncated",
    "load_tokenizer",
    "save_tokenizer",
    "split_into_chunks",
    "stream_text",
    "tokenizer_files",
    "train_tokenizer",
]
