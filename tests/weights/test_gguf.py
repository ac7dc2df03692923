"""GGUF: written by us and read back; what it holds is what `gguf` itself says; broken ones are refused."""

import sys

import pytest
import torch

from qkv.errors import ConfigError, InputError, MissingExtraError, WeightsError
from qkv.models import build
from qkv.weights.gguf_file import read_gguf, write_gguf
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType
from tests.weights.loaded_models import SHAPES, TEXTS, assert_same_weights, byte_level, random_model, scored_pieces

gguf = pytest.importorskip("gguf", reason="the extra `formats` is not installed")


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_in_float32_comes_back_byte_for_byte(name, tmp_path):
    loaded = random_model(name)
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    back = read_gguf(tmp_path / "a.gguf")
    assert_same_weights(loaded, back)
    assert back.model.config == loaded.model.config
    write_gguf(back, tmp_path / "b.gguf", dtype=StorageDType.F32)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize(("numbers", "error"), [(StorageDType.F16, 2**-11), (StorageDType.Q8_0, 1 / 120)])
def test_smaller_numbers_come_back_near(numbers, error, tmp_path):
    config = SHAPES["llama, 2 queries a key"].replace(d_model=96, n_heads=6, n_kv_heads=2, d_ff=64)
    model = build(config)
    write_gguf(ModelBundle(model, None), tmp_path / "a.gguf", numbers=numbers)
    back = read_gguf(tmp_path / "a.gguf")
    assert back.tokenizer is None
    for name, parameter in model.named_parameters():
        assert (back.model.get_parameter(name) - parameter).abs().max() <= error * parameter.abs().max()
    kinds = {each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds == {"F32", numbers.name}


def test_rows_that_do_not_divide_by_32_are_kept_as_float16(tmp_path):
    write_gguf(random_model("gpt2"), tmp_path / "a.gguf", dtype=StorageDType.Q8_0)
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds["token_embd.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_every_kind_of_numbers_is_read_as_gguf_reads_it(kind, tmp_path):
    config = SHAPES["gpt2"].replace(d_model=32, n_heads=2, n_layers=1)
    loaded = ModelBundle(build(config), None)
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gpt2")
    for field in reader.fields.values():
        if field.name.startswith("gpt2."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    stored = gguf.GGMLQuantizationType[kind]
    for each in reader.tensors:
        if each.name == "token_embd.weight" and kind not in ("F32", "F16"):
            writer.add_tensor(each.name, gguf.quantize(each.data, stored), raw_dtype=stored)
        elif each.name == "token_embd.weight":
            writer.add_tensor(each.name, each.data.astype("float16" if kind == "F16" else "float32"))
        else:
            writer.add_tensor(each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = torch.as_tensor(gguf.quantize(loaded.model.embedding.token.weight.detach().numpy(), stored))
    expected = torch.tensor(gguf.dequantize(table.numpy(), stored))
    assert torch.equal(read_gguf(tmp_path / "b.gguf").model.embedding.token.weight, expected)


@pytest.mark.parametrize("tokenizer", [byte_level, scored_pieces], ids=["byte-level", "scored pieces"])
@pytest.mark.parametrize("text", [TEXTS[0], "the cat sat", "  two  blanks\n\n12345 don't", "ñandú 😀", ""])
def test_the_tokenizer_inside_cuts_as_it_did(tokenizer, text, tmp_path):
    before = tokenizer()
    write_gguf(random_model("gpt2", tokenizer=before), tmp_path / "a.gguf")
    after = read_gguf(tmp_path / "a.gguf").tokenizer
    assert after.encode(text) == before.encode(text)
    assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.special_tokens == before.special_tokens


def test_query_and_key_rows_lie_in_rotary_pairs(tmp_path):
    loaded = random_model("llama, 2 queries a key")
    write_gguf(loaded, tmp_path / "a.gguf", dtype=StorageDType.F32)
    stored = {each.name: torch.tensor(each.data) for each in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    # d_head = 6: rows 0 and 3 of a head are its first pair.
    pairs = torch.tensor([0, 3, 1, 4, 2, 5])
    for part, ours in (("q", "q_proj"), ("k", "k_proj")):
        weight = loaded.model.blocks[0].attention.get_submodule(ours).weight
        rows = torch.cat([pairs + start for start in range(0, len(weight), 6)])
        assert torch.equal(stored[f"blk.0.attn_{part}.weight"], weight[rows])
    assert torch.equal(stored["blk.0.attn_v.weight"], loaded.model.blocks[0].attention.v_proj.weight)


@pytest.mark.parametrize("kept", [3, 30, 500, 5000, -100])
def test_a_cut_off_file_is_refused_in_one_line(kept, tmp_path):
    write_gguf(random_model("gpt2"), tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"b\.gguf: [^\n]+$"):
        read_gguf(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 1, "n_heads": 5}, "a GGUF of architecture gpt2 cannot have n_kv_heads=1"),
        ({"positions": "alibi"}, "a GGUF of architecture gpt2 cannot have positions="),
        ({"positions": "rotary", "d_model": 40}, "a GGUF of architecture llama cannot have .*norm="),
    ],
)
def test_a_shape_that_gguf_does_not_know_is_refused_and_nothing_written(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_gguf(ModelBundle(build(SHAPES["gpt2"].replace(**changes)), None), tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"general\.architecture='bloom' is unknown; known: llama, gpt2"):
        read_gguf(tmp_path / "a.gguf")


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InputError, match="is there already"):
        write_gguf(random_model("gpt2"), tmp_path / "a.gguf")


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"a\.gguf: GGUF files need the package gguf; install qkv\[formats\]"):
        write_gguf(random_model("gpt2"), tmp_path / "a.gguf")
