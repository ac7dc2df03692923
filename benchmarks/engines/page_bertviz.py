"""BertViz's pages of transformers' eager attentions, each written as one HTML file; its scripts come from npm."""

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines.page_work import text_of
from benchmarks.engines.speaking import Answer, MissingPeerError, Question, Stopwatch, serve

NEEDS = (
    "needs PEERS/bertviz: pip install --target PEERS/bertviz ipython; "
    "pip install --target PEERS/bertviz --no-deps bertviz; "
    "npm install --prefix PEERS/bertviz d3@5.8.0 jquery@2 requirejs@2.3.6"
)


def describe(question: Question) -> Answer:
    if question["peers"] is None or not (Path(question["peers"]) / "bertviz/node_modules").is_dir():
        raise MissingPeerError(NEEDS)
    sys.path.append(str(Path(question["peers"]) / "bertviz"))
    try:
        import bertviz  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise MissingPeerError(f"{missing}; {NEEDS}") from None
    import importlib.metadata

    import transformers

    return {"versions": {"bertviz": importlib.metadata.version("bertviz"), "transformers": transformers.__version__}}


def write(question: Question) -> Answer:
    """`model-N.html` and `head-N.html` in `out`; what each took, and the attentions for comparison."""
    from bertviz import head_view, model_view  # pyright: ignore[reportMissingImports]
    from transformers import AutoModel, AutoTokenizer

    n, out = question["n_tokens"], Path(question["out"])
    model = AutoModel.from_pretrained(question["folder"], attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(question["folder"])
    ids = tokenizer(text_of(n), return_tensors="pt")["input_ids"]
    assert ids.shape[1] == n
    watch = Stopwatch()
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(ids[0])
    passed = watch.read()["wall"]
    answer = {}
    for name, view in (("model", model_view), ("head", head_view)):
        watch = Stopwatch()
        page = out / f"{name}-{n}.html"
        made = view(attentions, tokens, html_action="return").data
        page.write_text(f"<!doctype html><meta charset=utf-8><body>{made}</body>", encoding="utf-8")
        answer[name] = {"path": str(page), "seconds": passed + watch.read()["wall"], "bytes": page.stat().st_size}
    np.save(out / f"attentions-{n}.npy", torch.cat(attentions).numpy())
    return answer


if __name__ == "__main__":
    serve({"describe": describe, "write": write})
