"""Files of llama2.c: a published small model generates the known text, and invalid files are rejected."""

import struct
from pathlib import Path

import pytest
import torch

from qkv.errors import WeightsError
from qkv.tasks import load
from qkv.weights.llama2c import HEADER_FORMAT, read_llama2c
from qkv.weights.rotary_layout import halves_to_interleaved, interleaved_to_halves
from qkv.weights.single_file import load_gguf_or_llama2c
from tests.text.samples import published

D, D_FF, LAYERS, HEADS, KV, VOCAB_SIZE, CONTEXT = 12, 17, 2, 6, 3, 263, 7


def n_values(*, tied):
    n = VOCAB_SIZE * D + LAYERS * (2 * D + 2 * D * D + 2 * D * D // 2 + 3 * D * D_FF) + D + CONTEXT * D // HEADS
    return n if tied else n + VOCAB_SIZE * D


def write_model(file, *, tied=True, **changes):
    sizes = {"d": D, "ff": D_FF, "layers": LAYERS, "heads": HEADS, "kv": KV}
    sizes |= {"vocab_size": VOCAB_SIZE if tied else -VOCAB_SIZE, "context": CONTEXT, **changes}
    values = torch.randn(n_values(tied=tied), generator=torch.Generator().manual_seed(3))
    file.write_bytes(HEADER_FORMAT.pack(*sizes.values()) + values.numpy().tobytes())
    return file


def write_tokens(file, n):
    tokens = [f"token{i}".encode() for i in range(n)]
    body = b"".join(struct.pack("<fi", -float(i), len(token)) + token for i, token in enumerate(tokens))
    file.write_bytes(struct.pack("<i", 8) + body)


def test_stories260k_generates_the_known_text():
    task = load(published("stories260K.bin"))
    assert task.tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    text = task.generate("Once upon a time", temperature=0.0, max_new=60)
    assert text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
    )


@pytest.mark.parametrize("text", ["Once upon a time, Lily's dog", "é 😀 ñ\n\ttab", " two  blanks ", ""])
def test_the_tokenizer_round_trips_every_text(text):
    tokenizer = load(published("stories260K.bin")).tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_rotary_layout_conversions_are_inverse():
    rows = torch.arange(2 * 6)[:, None]
    halves = interleaved_to_halves(rows, n_heads=2)
    assert halves.flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(halves_to_interleaved(halves, n_heads=2), rows)


@pytest.mark.parametrize("tied", [True, False])
def test_every_number_in_the_file_is_loaded(tmp_path, tied):
    file = write_model(tmp_path / "model.bin", tied=tied)
    model = read_llama2c(file).model
    assert model.config.tie_embeddings is tied
    angles = CONTEXT * D // HEADS
    assert sum(parameter.numel() for parameter in model.parameters()) == n_values(tied=tied) - angles
    stored = torch.frombuffer(bytearray(file.read_bytes()[HEADER_FORMAT.size :]), dtype=torch.float32)
    assert torch.equal(model.embedding.token.weight.flatten(), stored[: VOCAB_SIZE * D])
    if not tied:
        assert torch.equal(model.unembedding.weight.flatten(), stored[-VOCAB_SIZE * D :])


def test_a_truncated_file_is_rejected_with_both_sizes(tmp_path):
    file = write_model(tmp_path / "model.bin")
    n_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match=rf"\b{n_bytes - 4} bytes.*\b{n_bytes}\b"):
        load_gguf_or_llama2c(file)


def test_a_pickle_is_rejected_without_opening_it(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: pickled"):
        load_gguf_or_llama2c(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 100])
def test_any_other_file_is_rejected_and_named_once(tmp_path, data, monkeypatch):
    (tmp_path / "model.dat").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "model.dat", Path("model.dat")):
        with pytest.raises(WeightsError, match=rf"^{file}: .*\.gguf.*\.bin"):
            load_gguf_or_llama2c(file)


@pytest.mark.parametrize("name", ["tok263.bin", "tokenizer.bin"])
def test_the_tokenizer_is_found_in_the_folder_of_the_model(tmp_path, name):
    write_tokens(tmp_path / name, VOCAB_SIZE)
    tokenizer = load_gguf_or_llama2c(write_model(tmp_path / "model.bin")).tokenizer
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_a_tokenizer_of_a_different_size_is_rejected(tmp_path):
    write_model(tmp_path / "model.bin")
    write_tokens(tmp_path / "tokenizer.bin", VOCAB_SIZE - 1)
    with pytest.raises(WeightsError, match=r"tokenizer\.bin: .*\b263\b.*\b262\b"):
        load_gguf_or_llama2c(tmp_path / "model.bin")
    write_tokens(tmp_path / "tokenizer.bin", VOCAB_SIZE + 1)
    with pytest.raises(WeightsError, match=r"tokenizer\.bin: .*\d+ bytes.*\b263 tokens"):
        load_gguf_or_llama2c(tmp_path / "model.bin")
