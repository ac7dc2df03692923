"""Read llama2.c models, which are Llama models with float32 weights in one `.bin` file and a tokenizer in another."""

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.choices import Activation, NormKind, PositionKind, SpecialToken
from qkv.config import GPTConfig
from qkv.errors import WeightsError
from qkv.models import build
from qkv.text import Tokenizer
from qkv.weights.model_loader import ModelBundle, load_into, native_name_table
from qkv.weights.rotary_layout import interleaved_to_halves
from qkv.weights.sentencepiece import SPACE_SYMBOL, SentencePieceVocab, build_sentencepiece_tokenizer

HEADER_FORMAT = struct.Struct("<7i")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_HEADER_VALUE = 1 << 24
"""The upper limit for a plausible model size in a header."""


@dataclass(frozen=True)
class Llama2cHeader:
    """The seven integers at the start of a llama2.c file. A negative vocabulary size indicates untied embeddings."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    signed_vocab_size: int
    context_length: int

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=abs(self.signed_vocab_size),
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
            tie_embeddings=self.signed_vocab_size > 0,
        )


def read_llama2c(file: Path) -> ModelBundle:
    """Load a llama2.c model and its tokenizer.

    The tokenizer is read from `tokN.bin` (N is the vocabulary size) or `tokenizer.bin` in the same folder.
    """
    data = file.read_bytes()
    header = _read_header(file, data)
    config = header.config
    model = build(config)
    load_into(model, _convert_llama2c_tensors(file, data, header), native_name_table(model))
    vocab_size = config.vocab_size
    candidates = [file.with_name(f"tok{vocab_size}.bin"), file.with_name("tokenizer.bin")]
    tokenizer_file = next((path for path in candidates if path.is_file()), None)
    tokenizer = None if tokenizer_file is None else read_llama2c_tokenizer(tokenizer_file, vocab_size=vocab_size)
    return ModelBundle(model.eval(), tokenizer)


def read_llama2c_tokenizer(file: Path, *, vocab_size: int) -> Tokenizer:
    """Read a llama2.c tokenizer file: an integer followed by the score, length and bytes of each token.

    Each training text starts with `<s>`. Since texts have no end token, the `<s>` of the next text marks the end.
    """
    n_reserved = EOS_ID + 1 + 256
    if vocab_size < n_reserved:
        raise WeightsError(
            f"{file}: a vocabulary of {vocab_size} tokens is too small for the {n_reserved} special tokens and bytes"
        )
    data = file.read_bytes()
    offset, tokens, scores = 4, [], []
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8 + length
            if length < 0 or offset > len(data):
                raise struct.error
            scores.append(score)
            tokens.append(data[offset - length : offset].decode())
    except (struct.error, UnicodeDecodeError):
        raise WeightsError(
            f"{file}: not a llama2.c tokenizer of {vocab_size} tokens: token {len(tokens)} cannot be read"
        ) from None
    if offset != len(data):
        raise WeightsError(
            f"{file}: has {len(data)} bytes, but the entries of the model's {vocab_size} tokens end at byte {offset}"
        )
    tokens = [token.replace(" ", SPACE_SYMBOL) for token in tokens]
    # Older files contain the 256 byte tokens as characters. Newer files write them in the form <0x0A>.
    tokens[:n_reserved] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return build_sentencepiece_tokenizer(
        SentencePieceVocab(
            tokens=tokens,
            scores=scores,
            control_ids=frozenset({UNK_ID, BOS_ID, EOS_ID}),
            special_ids={SpecialToken.UNK: UNK_ID, SpecialToken.BOS: BOS_ID, SpecialToken.EOS: BOS_ID},
        )
    )


def has_plausible_llama2c_header(file: Path) -> bool:
    """Return whether a file starts with plausible model sizes. Pickles and archives never do."""
    with file.open("rb") as stream:
        start = stream.read(HEADER_FORMAT.size)
    if len(start) < HEADER_FORMAT.size:
        return False
    sizes = HEADER_FORMAT.unpack(start)
    return all(0 < abs(size) < MAX_HEADER_VALUE for size in sizes) and sizes[0] % sizes[3] == 0


def _read_header(file: Path, data: bytes) -> Llama2cHeader:
    if len(data) < HEADER_FORMAT.size:
        raise WeightsError(f"{file}: has {len(data)} bytes, but a llama2.c header requires {HEADER_FORMAT.size}")
    return Llama2cHeader(*HEADER_FORMAT.unpack_from(data))


def _convert_llama2c_tensors(file: Path, data: bytes, header: Llama2cHeader) -> dict[str, Tensor]:
    """Return all tensors of a llama2.c file, keyed by our parameter names.

    For each kind of tensor, the file contains the tensors of all layers one after another. The file's tables of rotary
    angles are skipped because our models compute the angles.
    """
    config = header.config
    d, width, kv_width = config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    layer_shapes = {
        "attention_norm": (d,),
        "attention.q_proj": (width, d),
        "attention.k_proj": (kv_width, d),
        "attention.v_proj": (kv_width, d),
        "attention.out_proj": (d, width),
        "feed_forward_norm": (d,),
        "feed_forward.gate_proj": (config.d_ff, d),
        "feed_forward.down_proj": (d, config.d_ff),
        "feed_forward.up_proj": (config.d_ff, d),
    }
    shapes = {
        "embedding.token.weight": (config.vocab_size, d),
        **{f"blocks.{i}.{part}.weight": shape for part, shape in layer_shapes.items() for i in range(config.n_layers)},
        "final_norm.weight": (d,),
        "rotary_angles": (config.context_length, config.d_head),
    }
    if not config.tie_embeddings:
        shapes["unembedding.weight"] = (config.vocab_size, d)
    n_bytes = HEADER_FORMAT.size + 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    if n_bytes != len(data):
        raise WeightsError(f"{file}: has {len(data)} bytes, but its header describes {n_bytes}")
    values = torch.frombuffer(bytearray(data[HEADER_FORMAT.size :]), dtype=torch.float32)
    parts = values.split([torch.Size(shape).numel() for shape in shapes.values()])
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    del tensors["rotary_angles"]
    for i in range(config.n_layers):
        for part, n_heads in (("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)):
            name = f"blocks.{i}.attention.{part}.weight"
            tensors[name] = interleaved_to_halves(tensors[name], n_heads=n_heads)
    return tensors
