"""Translations, their order, attention and alignment."""

import random
from dataclasses import replace

import pytest
import torch

from qkv.choices import AlignmentLayerAveraging, AttentionKernel, SpecialToken
from qkv.config import BeamConfig, RNNConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation import FinishReason, Hypothesis
from qkv.inspection.alignment import CrossAttention
from qkv.models import RNNSeq2Seq
from qkv.nn import use_attention_kernel
from qkv.tasks import Translator, load
from qkv.tasks.text_utils import contains_term, split_to_fit
from qkv.text.token_display import token_byte_spans, word_indices_of_ids, word_indices_of_spans
from qkv.weights.generation_config import GenerationConfig
from tests.tasks.small_translator import CONTEXT, WORDS, draw_text, reverse_words, save_translator, small_translator

RNG = random.Random(7)
TEXTS = [draw_text(RNG, RNG.randint(1, 5)) for _ in range(23)]


def test_batched_translations_equal_single_ones_in_order():
    task = small_translator()
    translations = task.translate(TEXTS)
    assert translations == [task.translate(text) for text in TEXTS]
    assert sum(translation == reverse_words(text) for translation, text in zip(translations, TEXTS, strict=True)) >= 22


def test_blank_text_stays_blank():
    task = small_translator()
    assert task.translate(["", "uno", " \t "]) == ["", "uno", ""]
    assert task.translate("") == ""
    assert task.translate_batch([" "], attention=True)[0].hypotheses[0].ids == []


@pytest.mark.parametrize("value", [5, None, ["uno", 5]])
def test_non_string_inputs_raise(value):
    unchecked = getattr(Translator.translate, "__wrapped__", Translator.translate)
    with pytest.raises(InputError, match=r"(5|None)$"):
        unchecked(small_translator(), value)


@pytest.mark.parametrize("text", ["-", "?!…", "😀🎉", "\u200b", " — "])
def test_a_text_without_letters_or_digits_is_unchanged(text):
    (translation,) = small_translator().translate_batch([text], attention=True)
    assert (translation.text, translation.hypotheses[0].ids, translation.attention) == (text.strip(), [], None)


def test_all_caps_text_outside_the_vocabulary_is_lowercased():
    task = small_translator()
    small, capitals = task.translate_batch(["«Tres cuatro cinco", "«TRES CUATRO CINCO"], attention=True)
    assert capitals.text == small.text.upper() != small.text
    assert capitals.attention.source == small.attention.source
    assert task.translate_batch(["U"])[0].source_tokens[1:-1] == ["U"]


def test_a_repeating_output_is_truncated(monkeypatch):
    task = small_translator()
    looping = task.tokenizer.encode("dos" + " uno" * 30, add_special_tokens=False)
    endless = Hypothesis(
        ids=looping, log_probabilities=[0.0] * len(looping), score=0.0, finish_reason=FinishReason.LENGTH
    )
    ended = replace(endless, finish_reason=FinishReason.STOP)
    monkeypatch.setattr("qkv.tasks.translator.translate_ids", lambda *_, **__: [[endless], [ended]])
    first, second = task.translate_batch(["uno", "uno"])
    assert (first.text, second.text) == ("dos uno", "dos" + " uno" * 30)
    assert first.hypotheses[0].ids == looping


@pytest.mark.parametrize("text", ["-", "UNO DOS TRES", "uno " * 11, "日本", "uno", "??"])
def test_unusual_texts_terminate(text):
    (translation,) = small_translator().translate_batch([text])
    assert len(translation.hypotheses[0].ids) <= 2 * len(translation.source_ids) + 10


def test_a_long_text_raises_or_is_split_at_sentences():
    task = small_translator()
    sentence = "uno dos tres."
    long = " ".join([sentence] * 9)
    n = len(task.tokenizer.encode(long))
    with pytest.raises(ContextLengthError, match=rf"text 2 has {n} tokens.*context_length of {CONTEXT}\b"):
        task.translate(["uno", long])
    with pytest.raises(ContextLengthError, match=r"context_length of 37: 'unounounounounounoun'…"):
        task.translate("uno" * 40, split=True)
    with pytest.raises(InputError, match=r"\b0\b"):
        task.translate_batch(["uno"], max_new=0)
    parts = task.split_to_context_length(long)
    assert " ".join(parts) == long
    assert all(part.endswith(".") for part in parts)
    assert task.translate(long, split=True) == " ".join(task.translate(parts))


def test_max_joined_limits_the_number_of_joined_sentences():
    plain = small_translator()
    sentence = "Uno dos."
    most = 2 * len(plain.tokenizer.encode(sentence))
    task = Translator(plain.model, plain.tokenizer, generation_config=GenerationConfig(max_joined=most))
    five = " ".join([sentence] * 5)
    assert task.split_to_context_length(five) == [f"{sentence} {sentence}"] * 2 + [sentence]
    assert (
        task.translate(five)
        == task.translate(five, split=True)
        == " ".join(plain.translate(task.split_to_context_length(five)))
    )
    assert task.translate(five, split=False) == plain.translate(five)
    long = "uno dos tres cuatro cinco seis siete ocho"  # longer than the limit, but a single sentence
    assert task.split_to_context_length(long) == [long]


def test_a_long_sentence_is_split_between_words():
    assert split_to_fit("a b c d e. f", lambda part: len(part) <= 5) == ["a b c", "d e.", "f"]
    assert split_to_fit("abcdefgh i", lambda part: len(part) <= 5) == ["abcdefgh", "i"]


def test_n_best_hypotheses_are_distinct_and_sorted():
    (translation,) = small_translator().translate_batch(["uno dos"], beam=BeamConfig(n_beams=4, n_best=3))
    scores = [hypothesis.score for hypothesis in translation.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(hypothesis.ids) for hypothesis in translation.hypotheses}) == 3
    assert (translation.text, translation.score) == (translation.hypotheses[0].text, scores[0])


def test_glossary_terms_occur_in_the_translation():
    task = small_translator()
    free, forced = (
        task.translate_batch(["uno dos tres", "cinco"], glossary=glossary) for glossary in ({}, {"Dos": "nueve diez"})
    )
    assert "nueve diez" in forced[0].text
    assert "nueve diez" not in free[0].text
    assert forced[1].text == free[1].text == "cinco"
    for blank in ({"dos": " "}, {"": "uno"}):
        with pytest.raises(InputError, match="glossary"):
            task.translate_batch(["dos"], glossary=blank)


def test_a_term_matches_complete_words():
    assert contains_term("El Gato negro", "gato")
    assert contains_term("¿Gato?", "gato")
    assert not contains_term("gatos", "gato")


def test_attention_contains_the_exact_weights_of_every_layer_and_head():
    task = small_translator()
    (translation,) = task.translate_batch(["uno dos tres cuatro"], attention=True)
    attention = translation.attention
    n_target, n_source = len(translation.hypotheses[0].ids), len(translation.source_ids)
    assert attention.weights.shape == (2, 4, n_target, n_source)
    torch.testing.assert_close(attention.weights.sum(-1), torch.ones(2, 4, n_target))
    recorded = []
    with torch.inference_mode(), use_attention_kernel(task.model, AttentionKernel.EAGER):
        ends = [block.cross_attention.weights.observe(recorded.append) for block in task.model.decoder.blocks]
        begin = task.tokenizer.special_id(SpecialToken.BOS)
        task.model(torch.tensor([translation.source_ids]), torch.tensor([[begin, *translation.hypotheses[0].ids[:-1]]]))
        for end in ends:
            end()
    torch.testing.assert_close(attention.weights, torch.cat(recorded))


def test_most_words_are_aligned_in_reverse():
    """The attention of such a small model is not always sharp, so only most links are correct."""
    texts = [text for text in TEXTS if len(text.split()) == 4]
    right = [
        source == 3 - target
        for translation in small_translator().translate_batch(texts, attention=True)
        for source, target in translation.attention.word_pairs()
    ]
    assert sum(right) / len(right) > 0.6


def test_pharaoh_format_lists_source_and_target_words():
    """The second layer aligns. Word 0 has two tokens, whose weights are summed, and <eos> is not a word."""
    blurred = torch.full((1, 3, 4), 0.25)
    sharp = torch.tensor([[[0.1, 0.1, 0.7, 0.1], [0.3, 0.25, 0.4, 0.05], [0.1, 0.0, 0.0, 0.9]]])
    attention = CrossAttention(
        weights=torch.stack((blurred, sharp)),
        source=["un", "o", " dos", "<eos>"],
        target=["two", " one", "<eos>"],
        source_word_ids=[0, 0, 1, None],
        target_word_ids=[0, 1, None],
    )
    assert attention.best_layer == 1
    assert attention.to_pharaoh() == "0-1 1-0"
    torch.testing.assert_close(attention.average(AlignmentLayerAveraging.ALL), (blurred + sharp)[0] / 2)
    torch.testing.assert_close(attention.to_heatmap().matrix, sharp[0])  # the plotted weights are the aligned ones


def test_tokens_have_word_indices():
    task = small_translator()
    text = "cuatro  dos"
    ids = task.tokenizer.encode(text)
    words = word_indices_of_spans(text, token_byte_spans(task.tokenizer, text, ids))
    assert (words[0], words[-1]) == (None, None)
    assert sorted(set(words[1:-1])) == [0, 1]
    spelt = "".join(task.tokenizer.decode([number]) for number, word in zip(ids, words, strict=True) if word == 0)
    assert spelt.strip() == "cuatro"
    assert word_indices_of_ids(task.tokenizer, task.tokenizer.encode("uno dos"))[0] is None
    assert word_indices_of_ids(task.tokenizer, task.tokenizer.encode("uno dos"))[-2] == 1


def test_heatmap_rows_are_target_tokens():
    (translation,) = small_translator().translate_batch(["uno dos tres"], attention=True)
    heatmap = translation.attention.to_heatmap()
    assert tuple(heatmap.matrix.shape) == (len(translation.hypotheses[0].ids), len(translation.source_ids))
    assert (heatmap.row_axis, heatmap.column_axis) == ("target token (each row sums to 1)", "source token")
    torch.testing.assert_close(heatmap.matrix.sum(1), torch.ones(len(translation.hypotheses[0].ids)))
    with pytest.raises(InputError, match=r"layer 2.*\b2 layers"):
        translation.attention.head_heatmaps(2)


@pytest.mark.parametrize("attention", ["general", "none"])
def test_an_rnn_translates_with_the_same_interface(attention):
    tokenizer = small_translator().tokenizer
    config = RNNConfig(vocab_size=tokenizer.vocab_size, d_model=10, context_length=CONTEXT, attention=attention)
    task = Translator(RNNSeq2Seq(config, seed=5).eval(), tokenizer)
    assert task.translate(TEXTS[:5]) == [task.translate(text) for text in TEXTS[:5]]
    if attention == "none":
        with pytest.raises(InputError, match="attention='none'"):
            task.translate_batch(["uno"], attention=True)
    else:
        (translation,) = task.translate_batch(["uno dos"], attention=True)
        assert translation.attention.weights.shape[:2] == (1, 1)


def test_a_saved_translator_is_loaded_with_its_source_tokenizer(tmp_path):
    task = small_translator()
    folder = save_translator(task, tmp_path / "model")
    assert isinstance(load(folder), Translator)
    assert load(folder).translate(TEXTS[:3]) == task.translate(TEXTS[:3])
    (folder / "source_tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    loaded = load(folder)
    assert loaded.source_tokenizer is not loaded.tokenizer
    assert loaded.translate(WORDS[0]) == task.translate(WORDS[0])
