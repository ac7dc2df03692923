"""RNN and Transformer by length: tasks are as described, and sequential steps are counted correctly."""

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
    monkeypatch.setattr(recurrence, "load_configs", lambda: SHAPES)
    monkeypatch.setattr(recurrence, "LENGTHS", (3, 11))
    monkeypatch.setattr(recurrence, "SECONDS_PER_MEASUREMENT", 0.001)
    monkeypatch.setattr(recurrence, "VOCAB_SIZE", 53)
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def test_an_rnn_has_sequential_steps_per_token_and_attention_per_layer():
    steps = {
        (kind, task): recurrence.sequential_steps(kind, config, task, 11)
        for kind, config in SHAPES.items()
        for task in recurrence.TITLES
    }
    assert steps == {
        ("RNN", "training step"): 2 * (3 + 2) * 11,
        ("Transformer", "training step"): 2 * (5 + 7),
        ("RNN", "encoder"): 3 * 11,
        ("Transformer", "encoder"): 5,
        ("RNN", "greedy decoding"): 3 * 11 + 2 * 11,
        ("Transformer", "greedy decoding"): 5 + 7 * 11,
    }


def test_decoding_generates_the_requested_number_of_tokens(small):
    for config in SHAPES.values():
        ((result,),) = recurrence.build_timed_steps(config, torch.device("cpu"))("greedy decoding", 11)()
        assert len(result.ids) == 11


def test_a_table_and_a_plot_are_written(small, tmp_path, capsys):
    assert command.main(["recurrence", "--out", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {task}", n] for task in ("training step", "encoder", "greedy decoding") for n in ("3", "11")
    ]
    assert (tmp_path / "recurrence-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_shipped_models_have_similar_sizes():
    rnn, transformer = (recurrence.count_parameters(config).total for config in recurrence.load_configs().values())
    assert 0.7 < rnn / transformer < 1.4
