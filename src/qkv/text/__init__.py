"""Text to ids and back: train, load and save a tokenizer; decode a stream without splitting a character."""

from qkv.text.cut import MAX_PART, cut
from qkv.text.files import load_tokenizer, save_tokenizer, tokenizer_files
from qkv.text.fitting import encode_cut, encode_rows
from qkv.text.streaming import StreamingDecoder, stream_text
from qkv.text.tokenizer import EncodedPair, Piece, Tokenizer
from qkv.text.train import END_OF_TEXT, train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "MAX_PART",
    "EncodedPair",
    "Piece",
    "StreamingDecoder",
    "Tokenizer",
    "cut",
    "encode_cut",
    "encode_rows",
    "load_tokenizer",
    "save_tokenizer",
    "stream_text",
    "tokenizer_files",
    "train_tokenizer",
]
