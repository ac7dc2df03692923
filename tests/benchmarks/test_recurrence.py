"""RNN and Transformer by length: what is timed is what is said, and steps are those that `cost` counts."""

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import recurrence
from qkv.config import RNNConfig, Seq2SeqConfig

SMALL = {"vocab_size": 53, "source_vocab_size": 53, "context_length": 31}
SHAPES = {
    "RNN": RNNConfig(d_model=12, n_encoder_layers=3, n_decoder_layers=2, **SMALL),
    "Transformer": Seq2SeqConfig(d_model=10, n_heads=2, n_encoder_layers=5, n_decoder_layers=7, **SMALL),
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(recurrence, "configs", lambda: SHAPES)
    monkeypatch.setattr(recurrence, "LENGTHS", (3, 11))
    monkeypatch.setattr(recurrence, "SPEND", 0.001)
    monkeypatch.setattr(recurrence, "VOCABULARY", 53)
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def test_a_recurrence_waits_for_every_token_and_attention_for_every_layer():
    counted = {
        (kind, work): recurrence.sequential_steps(kind, config, work, 11)
        for kind, config in SHAPES.items()
        for work in recurrence.TITLES
    }
    assert counted == {
        ("RNN", "training step"): 2 * (3 + 2) * 11, ("Transformer", "training step"): 2 * (5 + 7),
        ("RNN", "encoder"): 3 * 11, ("Transformer", "encoder"): 5,
        ("RNN", "greedy decoding"): 3 * 11 + 2 * 11, ("Transformer", "greedy decoding"): 5 + 7 * 11,
    }  # fmt: skip


def test_decoding_writes_as_many_tokens_as_it_says(small):
    for config in SHAPES.values():
        ((found,),) = recurrence.steps_of(config, torch.device("cpu"))("greedy decoding", 11)()
        assert len(found.ids) == 11


def test_a_table_and_one_picture_come_of_it(small, tmp_path, capsys):
    assert command.main(["recurrence", "--out", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {work}", n] for work in ("training step", "encoder", "greedy decoding") for n in ("3", "11")
    ]
    assert (tmp_path / "recurrence-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_shipped_shapes_have_one_vocabulary_and_a_like_size():
    rnn, transformer = (recurrence.parameters(config).total for config in recurrence.configs().values())
    assert 0.7 < rnn / transformer < 1.4
