"""Generation, streaming, stop strings and document scores of language models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.config import BeamConfig, GPTConfig, SamplingConfig
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.generation import FinishReason
from qkv.models import GPT
from qkv.tasks import LanguageModel
from qkv.tasks.language_model import PROMPTS_PER_BATCH
from qkv.tasks.log_likelihood import document_nll_sums, split_into_overlapping_windows
from qkv.text import Tokenizer
from tests.tasks.small_gpt import CONTEXT, small_gpt, small_model
from tests.text.samples import TEXTS, trained

PROMPTS = ["The cat", "El niño comió", "Zwölf 😀", "👩‍👩‍👧", "", "It's  two"]
samplings = st.builds(SamplingConfig, temperature=st.sampled_from((0.0, 1.0, 2.0)), seed=st.integers(0, 99))


class Scripted(LanguageModel):
    """Generates a fixed text, regardless of its weights and the sampling settings."""

    def __init__(self, task: LanguageModel, text: str) -> None:
        ids = task.tokenize("The cat")
        script = [*task.tokenizer.encode(text), task.tokenizer.special_id(SpecialToken.EOS)]
        config = GPTConfig(
            vocab_size=task.model.config.vocab_size,
            context_length=len(ids) + len(script) + 5,
            d_model=2,
            n_heads=1,
            n_layers=1,
        )
        super().__init__(GPT(config), task.tokenizer)

        def force_script(logits):
            forced = torch.full_like(logits, -30.0)
            for row in range(logits.shape[0]):
                forced[row, -1, script[min(self.n_generated, len(script) - 1)]] = 30.0
            self.n_generated += 1
            return forced

        self.n_generated = 0
        self.model.unembedding.logits.intervene(force_script)


@settings(max_examples=25)
@given(st.sampled_from(PROMPTS), samplings, st.sampled_from([(), ("a",), ("e", " d"), ("ñ", "😀")]))
def test_streamed_text_equals_the_decoded_ids(prompt, sampling, stop):
    task = small_gpt()
    (continuation,) = task.generate_batch([prompt], max_new=17, stop=stop, sampling=sampling)
    assert "".join(task.stream(prompt, max_new=17, stop=stop, sampling=sampling)) == continuation.text
    decoded = task.tokenizer.decode(continuation.ids)
    stops = [decoded.find(string) for string in stop if string in decoded]
    assert continuation.text == (decoded[: min(stops)] if stops else decoded)
    has_stopped = bool(stops) or continuation.ids[-1] in task.stop_ids
    assert (continuation.finish_reason is FinishReason.STOP) == has_stopped


@pytest.mark.parametrize("text", [" comió más: ¿qué? 😀👩‍👩‍👧 ñandú …", " sat.\nThen\n\nslept", " 日本 𝔘𝔫𝔦"])
def test_streaming_does_not_split_characters(text):
    """With byte-level tokens, each of these characters takes several ids."""
    task = Scripted(small_gpt(), text)
    assert len(task.tokenizer.encode(text)) > len(text) / 2
    parts = list(task.stream("The cat"))
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert len(parts) > 3


@pytest.mark.parametrize(
    ("text", "stop", "visible_text"),
    [
        (" sat on the mat", ["on the"], " sat "),
        (" sat on the mat", ["zzz", "t o"], " sa"),
        (" sat on", ["\n\n"], " sat on"),
        (" niño 😀 más", ["😀"], " niño "),
        (" niño 😀 más", ["o 😀 m"], " niñ"),
        (" sat on", [" "], ""),
    ],
)
def test_a_stop_string_split_over_tokens_ends_the_text(text, stop, visible_text):
    base = small_gpt()
    (got,) = Scripted(base, text).generate_batch(["The cat"], stop=stop)
    assert got.text == visible_text
    assert got.finish_reason is FinishReason.STOP
    assert "".join(Scripted(base, text).stream("The cat", stop=stop)) == visible_text


def test_the_end_token_ends_the_text_and_is_omitted():
    (got,) = Scripted(small_gpt(), " sat").generate_batch(["The cat"])
    assert got.text == " sat"
    assert got.ids[-1] == small_gpt().tokenizer.special_id(SpecialToken.EOS)
    assert got.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kind", list(TokenizerKind))
def test_prompt_and_continuation_join_to_the_decoded_ids(kind):
    """SentencePiece and WordPiece decoders drop the first space, which must be kept after a prompt."""
    task = LanguageModel(small_model(trained(kind, SpecialTokenStyle.GPT)), trained(kind, SpecialTokenStyle.GPT))
    for seed in range(5):
        sampling = SamplingConfig(temperature=2.0, seed=seed)
        (got,) = task.generate_batch(["The cat sat"], max_new=7, sampling=sampling)
        prompt = task.tokenize("The cat sat")
        assert task.tokenizer.decode(prompt) + got.text == task.tokenizer.decode([*prompt, *got.ids])


def test_batched_prompts_equal_single_prompts():
    task, sampling = small_gpt(), SamplingConfig(seed=7)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(PROMPTS_PER_BATCH + 3)]
    batched = task.generate_batch(prompts, max_new=5, sampling=sampling)
    for row in (0, 1, 5, PROMPTS_PER_BATCH - 1, PROMPTS_PER_BATCH, PROMPTS_PER_BATCH + 2):
        (single,) = task.generate_batch([prompts[row]], max_new=5, sampling=sampling.replace(seed=7 + row))
        assert (batched[row].text, batched[row].ids) == (single.text, single.ids)


def test_generate_takes_sampling_settings_as_keywords():
    task = small_gpt()
    greedy = task.generate("The cat", max_new=9, temperature=0, seed=3)
    assert greedy == task.generate("The cat", max_new=9, temperature=0, seed=4)
    assert task.generate("The cat", max_new=9, temperature=3, seed=3) != greedy
    with pytest.raises(ConfigError, match=r"'temprature'.*'temperature'"):
        task.generate("The cat", temprature=1)
    with pytest.raises(ConfigError, match=r"temperature=-1.*\b0\b"):
        task.generate("The cat", temperature=-1)


def test_an_empty_prompt_becomes_the_begin_token():
    task = small_gpt()
    assert task.tokenize("") == [task.tokenizer.special_id(SpecialToken.BOS)]
    assert task.generate("", max_new=3, temperature=0)
    without = LanguageModel(task.model, Tokenizer(task.tokenizer.backend, {}))
    with pytest.raises(InputError, match=r"\b0 tokens"):
        without.generate("")


def test_prompts_at_and_beyond_the_context_length():
    task = small_gpt()
    ids = task.tokenizer.encode(" ".join(TEXTS))
    prompt = task.tokenizer.decode(ids[:CONTEXT])
    assert len(task.tokenize(prompt)) == CONTEXT
    (got,) = task.generate_batch([prompt])
    assert (len(got.ids), got.finish_reason) == (1, FinishReason.CONTEXT)
    with pytest.raises(ContextLengthError, match=rf"prompt 0 has \d+ tokens.*context_length.*\b{CONTEXT}\b"):
        task.generate(prompt + " and more")


def test_an_id_beyond_the_vocabulary_decodes_to_nothing():
    tokenizer = trained(TokenizerKind.BPE)
    config = GPTConfig(vocab_size=tokenizer.vocab_size + 7, context_length=9, d_model=2, n_heads=1, n_layers=1)
    task = LanguageModel(GPT(config), tokenizer)
    task.model.unembedding.logits.intervene(
        lambda logits: torch.zeros_like(logits).index_fill(-1, torch.tensor([logits.shape[-1] - 1]), 9.0)
    )
    assert task.generate("The", max_new=3, temperature=0) == ""


def test_beam_search_returns_the_best_first_with_scores():
    task = small_gpt()
    (continuations,) = task.beam_search(["The cat"], max_new=6, beam=BeamConfig(n_beams=4, n_best=3))
    scores = [continuation.score for continuation in continuations]
    assert scores == sorted(scores, reverse=True)
    for continuation in continuations:
        assert continuation.score == pytest.approx(sum(continuation.log_probabilities) / len(continuation.ids))
        assert continuation.text == task.tokenizer.decode(continuation.ids)
    ((continuation,),) = task.beam_search(["The cat"], max_new=6, beam=BeamConfig(n_beams=1))
    assert continuation.text == task.generate("The cat", max_new=6, temperature=0)


@torch.no_grad()
def score_directly(task, text):
    """Score one target at a time in float64, with the documented windows."""
    begin, end = task.tokenizer.special_id(SpecialToken.BOS), task.tokenizer.special_id(SpecialToken.EOS)
    ids, n = [begin, *task.tokenizer.encode(text), end], task.model.config.context_length
    total, half = 0.0, n // 2
    for at in range(1, len(ids)):
        first = 0 if at <= n else n - half + (at - n - 1) // (n - half) * (n - half)
        total -= float(task.model(torch.tensor([ids[first:at]]))[0, -1].log_softmax(-1)[ids[at]])
    return total


DOCUMENTS = ["The cat sat.", "  El niño comió 😀\n", "x", TEXTS[0], "\n".join(TEXTS[:3]), "the mat", "", TEXTS[1] * 2]


@pytest.mark.parametrize("context", [7, 20, CONTEXT])
def test_batched_scores_equal_single_scores(context):
    task = small_gpt(context=context)
    scores = list(task.score_documents(DOCUMENTS))
    assert len(scores) == len(DOCUMENTS)
    for document, score in zip(DOCUMENTS, scores, strict=True):
        text = document.strip()
        assert score.loss_sum == pytest.approx(score_directly(task, text), rel=1e-6)
        assert score.n_targets == len(task.tokenizer.encode(text)) + 1
        assert score.n_bytes == len(text.encode())
        assert task.score(document).loss_sum == pytest.approx(score.loss_sum, rel=1e-6)


@pytest.mark.parametrize("max_batch_tokens", [1, 13, 50, 10**6])
def test_scores_do_not_depend_on_the_batch_size(max_batch_tokens):
    model = small_model(trained(TokenizerKind.BPE))
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in (2, 90, 5, 41, 42, 43, 3, 2)]
    expected = [next(document_nll_sums(model, [ids])) for ids in documents]
    assert list(document_nll_sums(model, documents, max_batch_tokens=max_batch_tokens)) == pytest.approx(
        expected, rel=1e-6
    )


@given(st.integers(2, 60), st.integers(1, 17))
def test_windows_score_every_token_once_with_half_a_context(n, context):
    scored = []
    for window in split_into_overlapping_windows(0, list(range(n)), context):
        assert len(window.ids) <= context + 1
        new = window.ids[1 + window.n_already_scored :]
        assert new
        if window.ids[0] > 0:
            assert new[0] - window.ids[0] > context // 2
        scored += new
    assert scored == list(range(1, n))


def test_bits_per_byte_use_the_stripped_text():
    task = small_gpt()
    score = task.score(" niño ")
    assert score.n_bytes == 5
    assert score.bits_per_byte == pytest.approx(score_directly(task, "niño") / math.log(2) / 5, rel=1e-6)


def test_a_scored_document_has_one_begin_token():
    """The tokenizer adds <bos> itself, but it is only scored once."""
    tokenizer = trained(TokenizerKind.BPE, SpecialTokenStyle.SEQ2SEQ)
    assert len(tokenizer.encode("The cat")) == len(tokenizer.encode("The cat", add_special_tokens=False)) + 2
    score = LanguageModel(small_model(tokenizer), tokenizer).score("The cat")
    assert score.n_targets == len(tokenizer.encode("The cat", add_special_tokens=False)) + 1


def test_a_non_causal_model_cannot_score():
    tokenizer = trained(TokenizerKind.BPE)
    config = GPTConfig(
        vocab_size=tokenizer.vocab_size, context_length=9, d_model=2, n_heads=1, n_layers=1, causal=False
    )
    with pytest.raises(InputError, match="causal=False"):
        LanguageModel(GPT(config), tokenizer).score("The cat")
