"""Published folders of Marian, BART and T5 with random weights, and tokenizers trained on a few sentences."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers as hf

from tests.reference.published_configs import NO_IDS, Case, sides

SPANISH = [
    "¿Dónde está la biblioteca?", "No lo sé, pero mañana iré al mercado.", "El perro come pan y la casa es grande.",
    "¿Cuántos años tiene tu hermana?", "Me gusta leer libros por la noche.", "La niña corre hacia el río.",
]  # fmt: skip
ENGLISH = [
    "Where is the library?", "I do not know, but tomorrow I will go to the market.", "The dog eats bread.",
    "How old is your sister?", "I like to read books at night.", "The girl runs towards the river.",
]  # fmt: skip
SPECIALS = ["</s>", "<unk>", "<pad>"]


def train_sentencepiece(sentences: list[str], **options: Any) -> bytes:
    """Train a SentencePiece model and return the bytes of its file."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 9), model_writer=buffer, hard_vocab_limit=False, minloglevel=2,
        **{"vocab_size": 97, "model_type": "unigram", **options},
    )  # fmt: skip
    return buffer.getvalue()


def read_tokens(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(len(processor)) if not processor.is_control(i)]


def marian_tokenizer(folder: Path, *, separate: bool = False) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    models = {"source": train_sentencepiece(SPANISH), "target": train_sentencepiece(ENGLISH)}
    for side, model in models.items():
        (folder / f"{side}.spm").write_bytes(model)
    tokens_by_side = {side: [p for p in read_tokens(model) if p != "<unk>"] for side, model in models.items()}
    files = {
        "vocab.json": tokens_by_side["source"] if separate else tokens_by_side["source"] + tokens_by_side["target"]
    }
    if separate:
        files["target_vocab.json"] = tokens_by_side["target"]
    for name, tokens in files.items():
        names = dict.fromkeys([*SPECIALS[:2], *tokens, ">>en<<", SPECIALS[2]])
        (folder / name).write_text(json.dumps({token: i for i, token in enumerate(names)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": separate}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asks for sacremoses, which changes punctuation
        return hf.MarianTokenizer.from_pretrained(folder, separate_vocabs=separate)


def marian(folder: Path, *, shape: dict[str, Any], separate: bool = False) -> tuple[Any, Any]:
    theirs = marian_tokenizer(folder, separate=separate)
    n = len(theirs.get_src_vocab())
    target_vocab_size = len(json.loads((folder / "target_vocab.json").read_text())) if separate else n
    pad = (target_vocab_size if separate else n) - 1
    case = Case(
        hf.MarianMTModel, hf.MarianConfig,
        {
            "vocab_size": n, "decoder_vocab_size": target_vocab_size, "pad_token_id": pad,
            "max_position_embeddings": 61,
            "share_encoder_decoder_embeddings": not separate, "tie_word_embeddings": True,
            "eos_token_id": 0, "decoder_start_token_id": pad, "forced_eos_token_id": None, **shape,
        },
    )  # fmt: skip
    model = case.published()
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    return model, theirs


def bart(folder: Path, *, shape: dict[str, Any]) -> tuple[Any, Any]:
    folder.mkdir(parents=True)
    trainer = tokenizers.ByteLevelBPETokenizer()
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer.train_from_iterator(SPANISH * 3, vocab_size=300, special_tokens=names, show_progress=False)
    trainer.save_model(str(folder))
    theirs = hf.BartTokenizer.from_pretrained(folder)
    case = Case(
        hf.BartForConditionalGeneration, hf.BartConfig,
        {
            "vocab_size": 300, "max_position_embeddings": 61, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
            "decoder_start_token_id": 2, **shape,
        },
    )  # fmt: skip
    model = case.published()
    model.generation_config.forced_bos_token_id, model.generation_config.forced_eos_token_id = 0, None
    model.save_pretrained(folder)
    return model, theirs


def t5(folder: Path, *, shape: dict[str, Any], tasks: dict[str, Any]) -> tuple[Any, Any]:
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(train_sentencepiece(SPANISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 7}))
    theirs = SentencePieceT5(folder / "spiece.model")
    n = len(theirs.processor) + 7
    case = Case(
        hf.T5ForConditionalGeneration, hf.T5Config,
        {**NO_IDS, "vocab_size": n, "n_positions": 61, "eos_token_id": 1, "decoder_start_token_id": 0, **shape},
    )  # fmt: skip
    model = case.published()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "task_specific_params": tasks}))
    return model, theirs


class SentencePieceT5:
    """Tokenizer of T5 based on `sentencepiece`, because `transformers` needs another library to read its file."""

    def __init__(self, file: Path) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(file))

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*self.processor.encode(text), 1]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return self.processor.decode([number for number in ids if 2 < number < len(self.processor)])


GERMAN = {"translation_en_to_de": {"prefix": "translate English to German: "}}
T5_SHAPES = [
    {"d_model": 35, "d_kv": 6, "num_heads": 5, "d_ff": 37, "num_layers": 2},
    {
        "d_model": 22, "d_kv": 13, "num_heads": 3, "d_ff": 17, "num_layers": 3, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
]  # fmt: skip
FOLDERS = {
    "marian, swish": lambda folder: marian(
        folder, shape={**sides(2, 3, 5, 37), "d_model": 30, "activation_function": "swish", "scale_embedding": True}
    ),
    "marian, relu": lambda folder: marian(
        folder, shape={**sides(3, 1, 3, 17), "d_model": 42, "activation_function": "relu"}
    ),
    "marian, two vocabularies": lambda folder: marian(
        folder, shape={**sides(1, 2, 2, 29), "d_model": 26, "scale_embedding": True}, separate=True
    ),
    "bart": lambda folder: bart(folder, shape={**sides(2, 3, 5, 37), "d_model": 35}),
    "bart, scaled": lambda folder: bart(
        folder, shape={**sides(3, 1, 3, 17), "d_model": 21, "scale_embedding": True, "activation_function": "relu"}
    ),
    "t5 1.0": lambda folder: t5(folder, shape=T5_SHAPES[0], tasks={}),
    "t5 1.1, one task": lambda folder: t5(folder, shape=T5_SHAPES[1], tasks=GERMAN),
}
