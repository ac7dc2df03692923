"""What a model computes in one step of work, operation by operation, for the four families."""

from dataclasses import replace
from typing import assert_never

from qkv.choices import PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.blocks import ACTIVATION, Stack, norm
from qkv.cost.operation import LOGITS, Kept, Operation, Phase, linear, logits, loss, over_steps, table
from qkv.cost.recurrent import rnn_operations
from qkv.cost.workload import Mode, Workload


def operations(config: ModelConfig, work: Workload) -> list[Operation]:
    """In the order they are run; parts are named as the model's modules are, layer numbers left out."""
    work.check(config)
    match work.mode:
        case Mode.GENERATE:
            return _generation(config, work)
        case Mode.TRAIN:
            made = _one_pass(config, work)
            return [*made, *(loss(one) for one in made if one.name == LOGITS)]
        case _:
            return _one_pass(config, work)


def _generation(config: ModelConfig, work: Workload) -> list[Operation]:
    """The prompt's pass, then the decoding steps summed: exact, since each size grows evenly from step to step."""
    prompt = work.replace(mode=Mode.PREFILL, new=None, predictions=work.predictions or 1)
    made = [replace(one, phase=Phase.PREFILL) for one in _one_pass(config, prompt)]
    # Past its window a mask begins to hide keys: what grows evenly before it and after it is summed apart.
    window = config.sliding_window if isinstance(config, TransformerConfig) else None
    first, last = work.length + 1, work.last_length
    edge = last if window is None else min(max(window, work.length), last)
    for start, end in ((first, edge), (edge + 1, last)):
        if start <= end:
            steps = [
                _one_pass(config, work.replace(mode=Mode.DECODE, new=None, predictions=None, length=n))
                for n in (start, end)
            ]
            made += [over_steps(one, other, end - start + 1) for one, other in zip(*steps, strict=True)]
    return made


def _one_pass(config: ModelConfig, work: Workload) -> list[Operation]:
    match config:
        case GPTConfig():
            return _gpt(config, work)
        case BERTConfig():
            return _bert(config, work)
        case Seq2SeqConfig():
            return _seq2seq(config, work)
        case RNNConfig():
            return rnn_operations(config, work)
        case _:
            assert_never(config)


def stacks_of(config: ModelConfig, work: Workload) -> list[Stack]:
    """The stacks of blocks that one pass goes through, in order; an RNN has none."""
    same = {"batch": work.batch, "kernel": work.kernel, "on_gpu": work.on_gpu}
    is_step = work.mode is Mode.DECODE
    sizes = {**same, "n_queries": work.n_new, "n_keys": work.length, "is_cached": is_step}
    match config:
        case GPTConfig():
            return [Stack(config=config, n_layers=config.n_layers, causal=config.causal, **sizes)]
        case BERTConfig():
            return [Stack(config=config, n_layers=config.n_layers, causal=False, **sizes)]
        case Seq2SeqConfig():
            read = {**same, "n_queries": work.n_source, "n_keys": work.n_source}
            encoder = Stack(config=config, **read, prefix="encoder.", n_layers=config.n_encoder_layers, causal=False)
            sizes |= {"n_layers": config.n_decoder_layers, "n_source": work.n_source}
            decoder = Stack(config=config, **sizes, prefix="decoder.", causal=True)
            return [decoder] if is_step else [encoder, decoder]
        case RNNConfig():
            return []


def _side(
    config: TransformerConfig, work: Workload, stack: Stack, *, n_words: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:  # fmt: skip
    """From ids to a stack's last states."""
    prefix, rows = stack.prefix, stack.n_rows
    return [
        *_embedding(config, work, rows, prefix=prefix, n_words=n_words, n_segments=n_segments),
        *_relation(config, stack.n_queries, stack.n_keys, prefix=prefix),
        *stack.operations(),
        *_final_norm(config, work, rows, prefix=prefix),
    ]


def _gpt(config: GPTConfig, work: Workload) -> list[Operation]:
    (stack,) = stacks_of(config, work)
    return [*_side(config, work, stack), _unembedding(config, work.n_predicted)]


def _bert(config: BERTConfig, work: Workload) -> list[Operation]:
    """Every head of the config is run, once: the masked-word head where it predicts, the others on [CLS]."""
    (stack,) = stacks_of(config, work)
    return [*_side(config, work, stack, n_segments=config.n_segments or None), *_bert_heads(config, work)]


def _bert_heads(config: BERTConfig, work: Workload) -> list[Operation]:
    d, rows = config.d_model, work.n_predicted
    heads = []
    if config.pooler:
        on_first = {"rows": work.batch, "bias": True}
        heads.append(linear("pooler", "project", **on_first, d_in=d, d_out=d, kept=Kept(numbers=work.batch * d)))
        if config.next_sentence_head:
            heads.append(linear("next_sentence", "project", **on_first, d_in=d, d_out=2))
        if config.n_classes is not None:
            heads.append(linear("classifier", "project", **on_first, d_in=d, d_out=config.n_classes))
    if config.masked_word_head:
        n, part = rows * d, "masked_word"
        heads += [
            linear(part, "dense", rows=rows, d_in=d, d_out=d, bias=True, kept=Kept(numbers=n, copies=n)),
            Operation(
                part=part, name="activation", elementwise=ACTIVATION[config.activation] * n, reads=n, writes=n,
                kept=Kept(wide=n),
            ),
            norm(config, part, rows=rows, on_gpu=work.on_gpu),
            _unembedding(config, rows, part=part),
        ]  # fmt: skip
    return heads


def _seq2seq(config: Seq2SeqConfig, work: Workload) -> list[Operation]:
    *encoder, decoder = stacks_of(config, work)
    read: list[Operation] = []
    for stack in encoder:
        token, *rest = _side(config, work, stack, n_words=config.source_vocab_size)
        if config.d_patch is not None:
            token = _patches(token.part, stack.n_rows, config.d_patch, config.d_model)
        read += [token, *rest]
    return [*read, *_side(config, work, decoder), _unembedding(config, work.n_predicted)]


def _patches(part: str, rows: int, d_patch: int, d_model: int) -> Operation:
    """A product in the place of the look-up. What it reads is the batch's own, and nobody needs its gradient."""
    kept = Kept(copies=rows * d_patch)
    made = linear(part, "project", rows=rows, d_in=d_patch, d_out=d_model, bias=False, kept=kept)
    return replace(made, no_gradient=rows * d_patch * d_model)


def _embedding(
    config: TransformerConfig, work: Workload, rows: int, *, prefix: str = "", n_words: int | None = None,
    n_segments: int | None = None,
) -> list[Operation]:  # fmt: skip
    """Token, segment, position, norm. `n_words`: of a source's table; a shared one is counted there."""
    d, part = config.d_model, f"{prefix}embedding"
    is_shared = n_words is None and isinstance(config, Seq2SeqConfig) and config.share_embeddings
    n_entries = config.vocab_size if n_words is None else n_words
    made = [
        table(
            f"{part}.token", "look-up", rows=rows, n_entries=n_entries, width=d, parameters=0 if is_shared else None
        )
    ]  # fmt: skip
    if n_segments is not None:
        made.append(table(f"{part}.segment", "look-up", rows=rows, n_entries=n_segments, width=d, add=True))
    match config.positions:
        case PositionKind.LEARNED:
            n_entries = config.context_length + config.position_offset
            made.append(table(f"{part}.position", "look-up", rows=rows, n_entries=n_entries, width=d, add=True))
        case PositionKind.SINUSOIDAL:
            n = rows * d
            made.append(Operation(part=f"{part}.position", name="add", elementwise=n, reads=n, writes=n, is_wide=True))
        case PositionKind.CONCATENATED:
            kept = Kept(whole=2 * rows * d, copies=2 * rows * d)
            joined = {"rows": rows, "d_in": 2 * d, "d_out": d}
            made.append(linear(f"{part}.position", "project", **joined, bias=False, kept=kept))
        case _:
            pass
    # What the first block reads, and what its norm goes back from.
    made.append(Operation(part=part, name="sum", kept=Kept(wide=rows * d)))
    if config.embedding_norm:
        made.append(norm(config, f"{part}.norm", rows=rows, on_gpu=work.on_gpu))
    return made


def _relation(config: TransformerConfig, n_queries: int, n_keys: int, *, prefix: str = "") -> list[Operation]:
    """T5's one table a side, looked up once for all layers; its indices (8 bytes each) are kept."""
    if config.positions is not PositionKind.RELATIVE:
        return []
    pairs = n_queries * n_keys
    look_up = Operation(
        part=f"{prefix}relation",
        name="look-up",
        parameters=config.relative_buckets * config.n_heads,
        weights=pairs * config.n_heads,
        writes=pairs * config.n_heads,
        is_wide=True,
        kept=Kept(flags=8 * pairs),
    )
    return [look_up]


def _final_norm(config: TransformerConfig, work: Workload, rows: int, *, prefix: str = "") -> list[Operation]:
    return [norm(config, f"{prefix}final_norm", rows=rows, on_gpu=work.on_gpu)] if config.final_norm else []


def _unembedding(config: TransformerConfig, rows: int, *, part: str = "unembedding") -> Operation:
    return logits(
        part,
        rows=rows,
        d_model=config.d_model,
        n_words=config.vocab_size,
        is_tied=config.tie_embeddings,
        bias=config.unembedding_bias,
    )
