"""llama2.c's files: a Llama in one `.bin` of float32, and its tokenizer in another beside it."""

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.choices import Activation, NormKind, PositionKind, Role
from qkv.config import GPTConfig
from qkv.errors import WeightsError
from qkv.models import build
from qkv.text import Tokenizer
from qkv.weights.models import Loaded, own_names
from qkv.weights.pieces import BLANK, Pieces, tokenizer_from_pieces
from qkv.weights.rotary_order import pairs_to_halves
from qkv.weights.tensors import fill

HEADER = struct.Struct("<7i")
UNKNOWN, BEGIN, END = 0, 1, 2
LARGEST = 1 << 24
"""A greater number in the header is no size of a model."""


@dataclass(frozen=True)
class Header:
    """Seven whole numbers. A vocabulary written negative says that the unembedding has its own matrix."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    signed_vocabulary: int
    context_length: int

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=abs(self.signed_vocabulary),
            context_length=self.context_length,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            n_layers=self.n_layers,
            d_ff=self.d_ff,
            activation=Activation.SILU,
            gated=True,
            norm=NormKind.RMS,
            positions=PositionKind.ROTARY,
            attention_bias=False,
            feed_forward_bias=False,
            tie_embeddings=self.signed_vocabulary > 0,
        )


def read_llama2c(file: Path) -> Loaded:
    """The tokenizer is `tokN.bin` (N: the vocabulary's size) or `tokenizer.bin` in the same folder."""
    data = file.read_bytes()
    header = _header(file, data)
    config = header.config
    model = build(config)
    fill(model, _tensors(file, data, header), own_names(model))
    size = config.vocab_size
    beside = [file.with_name(f"tok{size}.bin"), file.with_name("tokenizer.bin")]
    found = next((path for path in beside if path.is_file()), None)
    return Loaded(model.eval(), None if found is None else read_tokenizer(found, vocab_size=size))


def read_tokenizer(file: Path, *, vocab_size: int) -> Tokenizer:
    """A count, then each piece: score, length, bytes. A text begins at `<s>`, and the next one's `<s>` ends it."""
    least = END + 1 + 256
    if vocab_size < least:
        raise WeightsError(
            f"{file}: a vocabulary of {vocab_size} has no room for {least} special pieces and bytes"
        )
    data = file.read_bytes()
    place, tokens, scores = 4, [], []
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, place)
            place += 8 + length
            if length < 0 or place > len(data):
                raise struct.error
            scores.append(score)
            tokens.append(data[place - length : place].decode())
    except (struct.error, UnicodeDecodeError):
        raise WeightsError(
            f"{file}: not a llama2.c tokenizer of {vocab_size} pieces: piece {len(tokens)} cannot be read"
        ) from None
    if place != len(data):
        raise WeightsError(
            f"{file}: holds {len(data)} bytes, but the model's {vocab_size} pieces end after {place}"
        )
    tokens = [token.replace(" ", BLANK) for token in tokens]
    # Older files spell the 256 bytes as characters, newer ones as <0x0A>.
    tokens[:least] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer_from_pieces(
        Pieces(
            tokens=tokens,
            scores=scores,
            control=frozenset({UNKNOWN, BEGIN, END}),
            roles={Role.UNKNOWN: UNKNOWN, Role.BEGIN: BEGIN, Role.END: BEGIN},
        )
    )


def looks_like_llama2c(file: Path) -> bool:
    """By its header, which a pickle or an archive never is."""
    with file.open("rb") as stream:
        start = stream.read(HEADER.size)
    if len(start) < HEADER.size:
        return False
    sizes = HEADER.unpack(start)
    return all(0 < abs(size) < LARGEST for size in sizes) and sizes[0] % sizes[3] == 0


def _header(file: Path, data: bytes) -> Header:
    if len(data) < HEADER.size:
        raise WeightsError(f"{file}: {len(data)} bytes are fewer than llama2.c's header of {HEADER.size}")
    return Header(*HEADER.unpack_from(data))


def _tensors(file: Path, data: bytes, header: Header) -> dict[str, Tensor]:
    """The file's parts in their order, each over all layers; between them two tables of angles that we compute."""
    config = header.config
    d, width, kv_width = config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    shapes = {
        "attention_norm": (d,), "attention.query": (width, d), "attention.key": (kv_width, d),
        "attention.value": (kv_width, d), "attention.output": (d, width), "feedforward_norm": (d,),
        "feedforward.gate": (config.d_ff, d), "feedforward.contract": (d, config.d_ff),
        "feedforward.expand": (config.d_ff, d),
    }  # fmt: skip
    parts = {
        "embedding.token.weight": (config.vocab_size, d),
        **{f"blocks.{i}.{part}.weight": shape for part, shape in shapes.items() for i in range(config.n_layers)},
        "final_norm.weight": (d,),
        "angles": (config.context_length, config.d_head),
    }
    if not config.tie_embeddings:
        parts["unembedding.weight"] = (config.vocab_size, d)
    n_needed = HEADER.size + 4 * sum(torch.Size(shape).numel() for shape in parts.values())
    if n_needed != len(data):
        raise WeightsError(f"{file}: holds {len(data)} bytes, but its header describes {n_needed}")
    numbers = torch.frombuffer(bytearray(data[HEADER.size :]), dtype=torch.float32)
    pieces = numbers.split([torch.Size(shape).numel() for shape in parts.values()])
    tensors = {name: piece.view(shape) for (name, shape), piece in zip(parts.items(), pieces, strict=True)}
    del tensors["angles"]
    for i in range(config.n_layers):
        for part, n_heads in (("query", config.n_heads), ("key", config.n_kv_heads)):
            name = f"blocks.{i}.attention.{part}.weight"
            tensors[name] = pairs_to_halves(tensors[name], n_heads=n_heads)
    return tensors
