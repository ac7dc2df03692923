"""Run beam search in JoeyNMT with the same weights, using a clone in the folder of peers.

JoeyNMT's Transformer has no KV cache and processes the full target at every step. `UNUSED_IMPORTS` lists packages that
JoeyNMT imports but does not need for the search. They are replaced by stubs if they are not installed.
"""

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.beam_workload import END, PAD, TranslateFunction, Workload, serve_translation
from benchmarks.engines.nanogpt import version
from benchmarks.engines.protocol import MissingPeerError
from qkv.models import Seq2Seq
from qkv.nn.positions import sinusoidal_encoding

MODULE_NAMES = {
    "src_src_att": "attention",
    "trg_trg_att": "attention",
    "src_trg_att": "cross_attention",
    "layer_norm": "attention_norm",
    "x_layer_norm": "attention_norm",
    "dec_layer_norm": "cross_attention_norm",
}
UNUSED_IMPORTS = {
    "importlib_metadata": {"version": importlib.metadata.version},
    "torch.utils.tensorboard": {"SummaryWriter": object},
    "subword_nmt": {"apply_bpe": object},
}
PROJECTION_NAMES = {"q_layer": "q_proj", "k_layer": "k_proj", "v_layer": "v_proj", "output_layer": "out_proj"}


def find(peers: str | None) -> Path:
    if peers is None:
        raise MissingPeerError("no folder of peers was specified (--peers)")
    folder = Path(peers) / "joeynmt"
    if not (folder / "joeynmt" / "search.py").is_file():
        raise MissingPeerError("the folder of peers has no joeynmt/ (a clone of github.com/joeynmt/joeynmt)")
    return folder


def build(workload: Workload, options: dict[str, Any]) -> tuple[TranslateFunction, dict[str, str]]:
    folder = find(options["peers"])
    sys.path.insert(0, str(folder))
    _replace_unused()
    from joeynmt.search import beam_search

    peer = _build_peer_model(workload)

    @torch.inference_mode()
    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        mask = torch.ones(len(sources), 1, sources.shape[1], dtype=torch.bool)
        lengths = torch.full((len(sources),), sources.shape[1])
        states, hidden, _, _ = peer(return_type="encode", src=sources, src_length=lengths, src_mask=mask)
        ids, _, _ = beam_search(
            peer,
            workload.n_beams,
            states,
            hidden,
            mask,
            workload.length,
            alpha=1.0,
            no_repeat_ngram_size=no_repeat or -1,
            encoder_input=None,
        )
        return ids.tolist()

    return run, {"JoeyNMT": version(folder)}


def _replace_unused() -> None:
    for name, attributes in UNUSED_IMPORTS.items():
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)


def _build_peer_model(workload: Workload) -> Any:  # noqa: ANN401 - the peer's
    from joeynmt.model import build_model
    from joeynmt.vocabulary import Vocabulary

    marks = types.SimpleNamespace(
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        sep_token=None,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        lang_tags=[],
    )
    vocabulary = Vocabulary([f"w{i}" for i in range(workload.vocab_size - 4)], marks)
    side = {
        "type": "transformer",
        "num_heads": workload.n_heads,
        "hidden_size": workload.d_model,
        "ff_size": 4 * workload.d_model,
        "dropout": 0.0,
        "layer_norm": "post",
        "embeddings": {"embedding_dim": workload.d_model, "scale": True},
    }
    peer = build_model(
        {
            "encoder": {**side, "num_layers": workload.n_encoder_layers},
            "decoder": {**side, "num_layers": workload.n_decoder_layers},
            "tied_embeddings": True,
            "tied_softmax": True,
            "initializer": "xavier_uniform",
            "bias_initializer": "zeros",
            "embed_initializer": "xavier_uniform",
        },
        vocabulary,
        vocabulary,
    ).eval()
    peer.bos_index = peer.pad_index = PAD
    peer.eos_index = END
    _load_weights(peer, workload.model())
    return peer


@torch.no_grad()
def _load_weights(peer: Any, ours: Seq2Seq) -> None:  # noqa: ANN401
    peer.src_embed.lut.weight.copy_(ours.encoder.embedding.token.weight)
    assert ours.unembedding.bias is not None
    peer.decoder.output_layer.bias = nn.Parameter(ours.unembedding.bias.clone())
    for part in peer.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = ours.config.norm_eps
    for theirs, side in ((peer.encoder, ours.encoder), (peer.decoder, ours.decoder)):
        indices = torch.arange(theirs.pe.pe.shape[1])[None]
        theirs.pe.pe = sinusoidal_encoding(indices, ours.config.d_model, ours.config.sinusoid)
        for layer, block in zip(theirs.layers, side.blocks, strict=True):
            state = block.state_dict()
            layer.load_state_dict({name: state[_to_our_name(name)] for name in layer.state_dict()})


def _to_our_name(theirs: str) -> str:
    first, *middle, last = theirs.split(".")
    if first == "feed_forward":
        index = {"layer_norm": "feed_forward_norm", "0": "feed_forward.up_proj", "3": "feed_forward.down_proj"}
        return f"{index[middle[-1]]}.{last}"
    return ".".join([MODULE_NAMES[first], *(PROJECTION_NAMES[name] for name in middle), last])


if __name__ == "__main__":
    serve_translation(build)
