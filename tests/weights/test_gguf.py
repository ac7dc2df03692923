"""GGUF files round trip, agree with the `gguf` package, and are rejected if they are invalid."""

import sys

import pytest
import torch

from qkv.errors import ConfigError, InputError, MissingExtraError, WeightsError
from qkv.models import build
from qkv.weights.gguf_file import read_gguf, write_gguf
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType
from tests.weights.loaded_models import (
    SHAPES,
    TEXTS,
    assert_same_weights,
    byte_level_tokenizer,
    random_model,
    sentencepiece_tokenizer,
)

gguf = pytest.importorskip("gguf", reason="the extra `formats` is not installed")


@pytest.mark.parametrize("name", SHAPES)
def test_float32_weights_are_restored_exactly(name, tmp_path):
    loaded = random_model(name)
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    back = read_gguf(tmp_path / "a.gguf")
    assert_same_weights(loaded, back)
    assert back.model.config == loaded.model.config
    write_gguf(back, tmp_path / "b.gguf", dtype=StorageDType.F32)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize(("dtype", "error"), [(StorageDType.F16, 2**-11), (StorageDType.Q8_0, 1 / 120)])
def test_smaller_dtypes_are_restored_approximately(dtype, error, tmp_path):
    config = SHAPES["llama, group size 2"].replace(d_model=96, n_heads=6, n_kv_heads=2, d_ff=64)
    model = build(config)
    write_gguf(ModelBundle(model, None), tmp_path / "a.gguf", dtype=dtype)
    back = read_gguf(tmp_path / "a.gguf")
    assert back.tokenizer is None
    for name, parameter in model.named_parameters():
        assert (back.model.get_parameter(name) - parameter).abs().max() <= error * parameter.abs().max()
    tensor_types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert tensor_types == {"F32", dtype.name}


def test_rows_that_are_not_a_multiple_of_32_are_stored_as_float16(tmp_path):
    write_gguf(random_model("gpt2"), tmp_path / "a.gguf", dtype=StorageDType.Q8_0)
    tensor_types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert tensor_types["token_embd.weight"] == "F16"
    assert tensor_types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_every_tensor_type_is_dequantized_like_gguf_does(kind, tmp_path):
    config = SHAPES["gpt2"].replace(d_model=32, n_heads=2, n_layers=1)
    loaded = ModelBundle(build(config), None)
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gpt2")
    for field in reader.fields.values():
        if field.name.startswith("gpt2."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    tensor_type = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight" and kind not in ("F32", "F16"):
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, tensor_type), raw_dtype=tensor_type)
        elif tensor.name == "token_embd.weight":
            writer.add_tensor(tensor.name, tensor.data.astype("float16" if kind == "F16" else "float32"))
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = torch.as_tensor(gguf.quantize(loaded.model.embedding.token.weight.detach().numpy(), tensor_type))
    expected = torch.tensor(gguf.dequantize(table.numpy(), tensor_type))
    assert torch.equal(read_gguf(tmp_path / "b.gguf").model.embedding.token.weight, expected)


@pytest.mark.parametrize(
    "tokenizer", [byte_level_tokenizer, sentencepiece_tokenizer], ids=["byte-level", "sentencepiece"]
)
@pytest.mark.parametrize("text", [TEXTS[0], "the cat sat", "  two  blanks\n\n12345 don't", "ñandú 😀", ""])
def test_the_tokenizer_in_the_file_encodes_as_before(tokenizer, text, tmp_path):
    expected = tokenizer()
    write_gguf(random_model("gpt2", tokenizer=expected), tmp_path / "a.gguf")
    actual = read_gguf(tmp_path / "a.gguf").tokenizer
    assert actual.encode(text) == expected.encode(text)
    assert actual.decode(actual.encode(text)) == expected.decode(expected.encode(text))
    assert actual.special_tokens == expected.special_tokens


def test_query_and_key_rows_are_interleaved(tmp_path):
    loaded = random_model("llama, group size 2")
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    # With d_head = 6, rows 0 and 3 of a head are its first pair.
    pairs = torch.tensor([0, 3, 1, 4, 2, 5])
    for part, projection in (("q", "q_proj"), ("k", "k_proj")):
        weight = loaded.model.blocks[0].attention.get_submodule(projection).weight
        rows = torch.cat([pairs + start for start in range(0, len(weight), 6)])
        assert torch.equal(stored[f"blk.0.attn_{part}.weight"], weight[rows])
    assert torch.equal(stored["blk.0.attn_v.weight"], loaded.model.blocks[0].attention.v_proj.weight)


@pytest.mark.parametrize("n_bytes", [3, 30, 500, 5000, -100])
def test_a_truncated_file_is_rejected_in_one_line(n_bytes, tmp_path):
    write_gguf(random_model("gpt2"), tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:n_bytes])
    with pytest.raises(WeightsError, match=r"b\.gguf: [^\n]+$"):
        read_gguf(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 1, "n_heads": 5}, r"\bgpt2\b.*\bn_kv_heads=1"),
        ({"positions": "alibi"}, r"\bgpt2\b.*\bpositions="),
        ({"positions": "rotary", "d_model": 40}, r"\bllama\b.*\bnorm="),
    ],
)
def test_an_unsupported_config_is_rejected_before_writing(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_gguf(ModelBundle(build(SHAPES["gpt2"].replace(**changes)), None), tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_an_unknown_architecture_is_rejected(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"general\.architecture='bloom'.*llama, gpt2"):
        read_gguf(tmp_path / "a.gguf")


def test_existing_files_are_not_overwritten(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InputError, match=r"a\.gguf"):
        write_gguf(random_model("gpt2"), tmp_path / "a.gguf")


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"a\.gguf: .*qkv\[formats\]"):
        write_gguf(random_model("gpt2"), tmp_path / "a.gguf")
