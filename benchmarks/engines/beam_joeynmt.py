"""JoeyNMT's beam search with the same weights: a clone in the folder the user names.

It reads the whole target anew at each step: its Transformer has no cache. Packages that its modules import and that
its search does not use (`UNUSED`) are replaced where they are not installed.
"""

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.beam_work import END, PAD, Translate, Work, serve_translation
from benchmarks.engines.nanogpt import version
from benchmarks.engines.speaking import MissingPeerError
from qkv.models import Seq2Seq
from qkv.nn import sinusoidal_encoding

NAMES = {
    "src_src_att": "attention", "trg_trg_att": "attention", "src_trg_att": "cross_attention",
    "layer_norm": "attention_norm", "x_layer_norm": "attention_norm", "dec_layer_norm": "cross_attention_norm",
}  # fmt: skip
UNUSED = {
    "importlib_metadata": {"version": importlib.metadata.version},
    "torch.utils.tensorboard": {"SummaryWriter": object},
    "subword_nmt": {"apply_bpe": object},
}
INSIDE = {"q_layer": "q_proj", "k_layer": "k_proj", "v_layer": "v_proj", "output_layer": "out_proj"}


def find(peers: str | None) -> Path:
    if peers is None:
        raise MissingPeerError("no folder of peers was named (--peers)")
    folder = Path(peers) / "joeynmt"
    if not (folder / "joeynmt" / "search.py").is_file():
        raise MissingPeerError("the folder of peers has no joeynmt/ (a clone of github.com/joeynmt/joeynmt)")
    return folder


def build(work: Work, options: dict[str, Any]) -> tuple[Translate, dict[str, str]]:
    folder = find(options["peers"])
    sys.path.insert(0, str(folder))
    _replace_unused()
    from joeynmt.search import beam_search

    peer = _model(work)

    @torch.inference_mode()
    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        mask = torch.ones(len(sources), 1, sources.shape[1], dtype=torch.bool)
        lengths = torch.full((len(sources),), sources.shape[1])
        states, hidden, _, _ = peer(return_type="encode", src=sources, src_length=lengths, src_mask=mask)
        ids, _, _ = beam_search(
            peer, work.n_beams, states, hidden, mask, work.length, alpha=1.0,
            no_repeat_ngram_size=no_repeat or -1, encoder_input=None,
        )  # fmt: skip
        return ids.tolist()

    return run, {"JoeyNMT": version(folder)}


def _replace_unused() -> None:
    for name, attributes in UNUSED.items():
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)


def _model(work: Work) -> Any:  # noqa: ANN401 - the peer's
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    marks = types.SimpleNamespace(
        unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token=None,
        unk_id=0, pad_id=1, bos_id=2, eos_id=3, lang_tags=[],
    )  # fmt: skip
    words = Vocabulary([f"w{i}" for i in range(work.vocab_size - 4)], marks)
    side = {
        "type": "transformer", "num_heads": work.n_heads, "hidden_size": work.d_model, "ff_size": 4 * work.d_model,
        "dropout": 0.0, "layer_norm": "post", "embeddings": {"embedding_dim": work.d_model, "scale": True},
    }  # fmt: skip
    peer = build_model(
        {
            "encoder": {**side, "num_layers": work.n_encoder_layers},
            "decoder": {**side, "num_layers": work.n_decoder_layers},
            "tied_embeddings": True, "tied_softmax": True, "initializer": "xavier_uniform", "bias_initializer": "zeros",
            "embed_initializer": "xavier_uniform",
        },
        words, words,
    ).eval()  # fmt: skip
    peer.bos_index = peer.pad_index = PAD
    peer.eos_index = END
    _fill(peer, work.model())
    return peer


@torch.no_grad()
def _fill(peer: Any, ours: Seq2Seq) -> None:  # noqa: ANN401
    peer.src_embed.lut.weight.copy_(ours.encoder.embedding.token.weight)
    assert ours.unembedding.bias is not None
    peer.decoder.output_layer.bias = nn.Parameter(ours.unembedding.bias.clone())
    for part in peer.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = ours.config.norm_eps
    for theirs, side in ((peer.encoder, ours.encoder), (peer.decoder, ours.decoder)):
        places = torch.arange(theirs.pe.pe.shape[1])[None]
        theirs.pe.pe = sinusoidal_encoding(places, ours.config.d_model, ours.config.sinusoid)
        for layer, block in zip(theirs.layers, side.blocks, strict=True):
            own = block.state_dict()
            layer.load_state_dict({name: own[_our_name(name)] for name in layer.state_dict()})


def _our_name(theirs: str) -> str:
    first, *middle, last = theirs.split(".")
    if first == "feed_forward":
        place = {"layer_norm": "feed_forward_norm", "0": "feed_forward.up_proj", "3": "feed_forward.down_proj"}
        return f"{place[middle[-1]]}.{last}"
    return ".".join([NAMES[first], *(INSIDE[name] for name in middle), last])


if __name__ == "__main__":
    serve_translation(build)
