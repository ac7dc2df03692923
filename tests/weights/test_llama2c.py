"""llama2.c's files: a real small model speaks as it is known to, and broken ones are told apart."""

import struct
from pathlib import Path

import pytest
import torch

from qkv.errors import WeightsError
from qkv.tasks import load
from qkv.weights.llama2c import HEADER, read_llama2c
from qkv.weights.rotary_layout import halves_to_interleaved, interleaved_to_halves
from qkv.weights.single_file import load_single_file
from tests.text.samples import published

D, D_FF, LAYERS, HEADS, KV, VOCABULARY, CONTEXT = 12, 17, 2, 6, 3, 263, 7


def numbers(*, tied):
    n = VOCABULARY * D + LAYERS * (2 * D + 2 * D * D + 2 * D * D // 2 + 3 * D * D_FF) + D + CONTEXT * D // HEADS
    return n if tied else n + VOCABULARY * D


def written(file, *, tied=True, **changes):
    sizes = {"d": D, "ff": D_FF, "layers": LAYERS, "heads": HEADS, "kv": KV}
    sizes |= {"vocabulary": VOCABULARY if tied else -VOCABULARY, "context": CONTEXT, **changes}
    values = torch.randn(numbers(tied=tied), generator=torch.Generator().manual_seed(3))
    file.write_bytes(HEADER.pack(*sizes.values()) + values.numpy().tobytes())
    return file


def write_pieces(file, n):
    pieces = [f"piece{i}".encode() for i in range(n)]
    body = b"".join(struct.pack("<fi", -float(i), len(piece)) + piece for i, piece in enumerate(pieces))
    file.write_bytes(struct.pack("<i", 8) + body)


def test_stories260k_speaks():
    task = load(published("stories260K.bin"))
    assert task.tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    told = task.generate("Once upon a time", temperature=0.0, max_new=60)
    assert told.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
    )


@pytest.mark.parametrize("text", ["Once upon a time, Lily's dog", "é 😀 ñ\n\ttab", " two  blanks ", ""])
def test_its_tokenizer_gives_every_text_back(text):
    tokenizer = load(published("stories260K.bin")).tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_two_orders_undo_each_other_and_move_neighbours_to_halves():
    rows = torch.arange(2 * 6)[:, None]
    halves = interleaved_to_halves(rows, n_heads=2)
    assert halves.flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(halves_to_interleaved(halves, n_heads=2), rows)


@pytest.mark.parametrize("tied", [True, False])
def test_every_number_of_the_file_is_used_once(tmp_path, tied):
    file = written(tmp_path / "model.bin", tied=tied)
    model = read_llama2c(file).model
    assert model.config.tie_embeddings is tied
    angles = CONTEXT * D // HEADS
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers(tied=tied) - angles
    stored = torch.frombuffer(bytearray(file.read_bytes()[HEADER.size :]), dtype=torch.float32)
    assert torch.equal(model.embedding.token.weight.flatten(), stored[: VOCABULARY * D])
    if not tied:
        assert torch.equal(model.unembedding.weight.flatten(), stored[-VOCABULARY * D :])


def test_a_cut_off_file_is_refused_with_both_numbers(tmp_path):
    file = written(tmp_path / "model.bin")
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match=rf"holds {whole - 4} bytes, but its header describes {whole}"):
        load_single_file(file)


def test_a_pickle_is_refused_and_never_opened(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: pickled weights can run code"):
        load_single_file(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("data", [b"", b"hello", b"\0" * 100])
def test_any_other_file_is_refused_and_named_once(tmp_path, data, monkeypatch):
    (tmp_path / "model.dat").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "model.dat", Path("model.dat")):
        with pytest.raises(WeightsError, match=rf"^{file}: is neither a \.gguf nor a llama2\.c \.bin"):
            load_single_file(file)


@pytest.mark.parametrize("name", ["tok263.bin", "tokenizer.bin"])
def test_the_tokenizer_is_found_beside_the_model(tmp_path, name):
    write_pieces(tmp_path / name, VOCABULARY)
    tokenizer = load_single_file(written(tmp_path / "model.bin")).tokenizer
    assert tokenizer.vocab_size == VOCABULARY


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    written(tmp_path / "model.bin")
    write_pieces(tmp_path / "tokenizer.bin", VOCABULARY - 1)
    with pytest.raises(WeightsError, match=r"tokenizer\.bin: .* of 263 pieces: piece 262 cannot be read"):
        load_single_file(tmp_path / "model.bin")
    write_pieces(tmp_path / "tokenizer.bin", VOCABULARY + 1)
    with pytest.raises(WeightsError, match=r"tokenizer\.bin: holds \d+ bytes, but the model's 263 pieces end after"):
        load_single_file(tmp_path / "model.bin")
