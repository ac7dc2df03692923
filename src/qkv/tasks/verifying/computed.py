"""Do the fast roads through a model give what the plain road gives?"""

import os
import shutil

import torch

from qkv.choices import Kernel
from qkv.config import BeamConfig, SamplingConfig
from qkv.generation import beam_generate, generate, translate
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import using
from qkv.tasks.verifying import roads
from qkv.tasks.verifying.case import Case, NotCheckedError, apart

N_NEW = 16


def fused(case: Case) -> float:
    if isinstance(case.model, RNNSeq2Seq):
        raise NotCheckedError("an RNN's attention has one kernel alone")
    return case.difference(roads.run(case.model, one.ids, one.source)[0] for one in case.examples)


def on_cpu(case: Case) -> float:
    assert case.by_cpu is not None, "asked of another device alone"
    return apart(case.plain, case.by_cpu)


def cached(case: Case) -> float:
    model = _writer(case)
    ends = [(one, one.ids.shape[1]) for one in case.examples]
    return case.difference(roads.in_pieces(model, one.ids, range(n // 2, n), source=one.source)[0] for one, n in ends)


def batched(case: Case) -> float:
    """A text below itself read backwards."""
    both = [[part if part is None else torch.cat((part.flip(1), part)) for part in (one.ids, one.source)]
            for one in case.examples]  # fmt: skip
    return case.difference(roads.run(case.model, ids, source)[1] for ids, source in both if ids is not None)


def padded(case: Case) -> float:
    return case.difference(roads.padded(case.model, case.examples))


def packed(case: Case) -> float:
    """Each text behind another."""
    model, texts = case.model, [one.ids for one in case.examples]
    if not isinstance(model, GPT | BERT):
        raise NotCheckedError("an encoder–decoder takes one text a row")
    return case.difference(roads.packed(model, [texts[i - 1], texts[i]])[1] for i in range(len(texts)))


def compiled(case: Case) -> float:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        raise NotCheckedError("torch.compile needs a C++ compiler (g++), and there is none here")
    forward = torch.compile(roads.run, dynamic=True)
    return case.difference(forward(case.model, one.ids, one.source)[0] for one in case.examples)


def written(case: Case, *, n_beams: int) -> float:
    """The plain road reads what was written: its log p of every token and, without beams, how far from its best.

    So two tokens that are equally likely to rounding may change places.
    """
    shares = []
    for one, (new, log_p) in zip(case.examples, _written(case, n_beams=n_beams), strict=True):
        before = one.ids if one.source is None else one.ids[:, :1]
        ids = torch.cat((before, torch.tensor([new[:-1]], dtype=torch.long, device=case.device)), dim=1)
        with using(case.model, Kernel.PLAIN):
            logits = roads.run(case.model, ids, one.source)[0, -len(new) :].double().cpu()
        table = logits.log_softmax(-1)
        own = table.gather(1, torch.tensor(new)[:, None])[:, 0]
        gaps = [(own - torch.tensor(log_p, dtype=torch.float64)).abs()] + [table.amax(1) - own] * (n_beams == 1)
        shares.append(torch.cat(gaps).max() / logits.abs().max().clamp(min=1.0))
    return float(torch.stack(shares).max())


def _writer(case: Case) -> GPT | Seq2Seq | RNNSeq2Seq:
    model = case.model
    if isinstance(model, BERT):
        raise NotCheckedError("a BERT reads its text at once and writes nothing")
    if isinstance(model, GPT) and not model.config.causal:
        raise NotCheckedError("with causal=False there is no past to go on from")
    return model


def _written(case: Case, *, n_beams: int) -> list[tuple[list[int], list[float]]]:
    """New ids and their log p, of all texts together as commands do it; no token ends one, so all are long."""
    model, how = _writer(case), BeamConfig(n_beams=n_beams)
    prompts = [one.ids[0].tolist() for one in case.examples]
    if isinstance(model, GPT) and n_beams == 1:
        texts = generate(model, prompts, max_new=N_NEW, sampling=SamplingConfig(temperature=0.0))
        return [(text.new, text.log_probabilities) for text in texts]
    if isinstance(model, GPT):
        found = beam_generate(model, prompts, max_new=N_NEW, beam=how)
    else:
        sources = [one.source[0].tolist() for one in case.examples if one.source is not None]
        most = [N_NEW] * len(sources)
        found = translate(model, sources, first=prompts[0][0], max_new=most, stop_ids=frozenset(), beam=how)
    return [(best.ids, best.log_probabilities) for best, *_ in found]
