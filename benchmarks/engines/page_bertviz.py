"""Write BertViz pages that show the eager attention weights of Hugging Face models, each as one HTML file."""

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.engines.page_workload import make_text
from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, MissingPeerError, serve

NEEDS = (
    "needs PEERS/bertviz: pip install --target PEERS/bertviz ipython; "
    "pip install --target PEERS/bertviz --no-deps bertviz; "
    "npm install --prefix PEERS/bertviz d3@5.8.0 jquery@2 requirejs@2.3.6"
)


def describe(request: EngineRequest) -> EngineResponse:
    if request["peers"] is None or not (Path(request["peers"]) / "bertviz/node_modules").is_dir():
        raise MissingPeerError(NEEDS)
    sys.path.append(str(Path(request["peers"]) / "bertviz"))
    try:
        import bertviz  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise MissingPeerError(f"{missing}; {NEEDS}") from None
    import importlib.metadata

    import transformers

    return {"versions": {"bertviz": importlib.metadata.version("bertviz"), "transformers": transformers.__version__}}


def write(request: EngineRequest) -> EngineResponse:
    """Write `model-N.html` and `head-N.html`, and save the attention weights for comparison."""
    from bertviz import head_view, model_view  # pyright: ignore[reportMissingImports]
    from transformers import AutoModel, AutoTokenizer

    n, out = request["n_tokens"], Path(request["out"])
    model = AutoModel.from_pretrained(request["folder"], attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    ids = tokenizer(make_text(n), return_tensors="pt")["input_ids"]
    assert ids.shape[1] == n
    timer = ElapsedTimer()
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(ids[0])
    passed = timer.elapsed()["wall"]
    response = {}
    for name, view in (("model", model_view), ("head", head_view)):
        timer = ElapsedTimer()
        page = out / f"{name}-{n}.html"
        outputs = view(attentions, tokens, html_action="return").data
        page.write_text(f"<!doctype html><meta charset=utf-8><body>{outputs}</body>", encoding="utf-8")
        response[name] = {"path": str(page), "seconds": passed + timer.elapsed()["wall"], "bytes": page.stat().st_size}
    np.save(out / f"attentions-{n}.npy", torch.cat(attentions).numpy())
    return response


if __name__ == "__main__":
    serve({"describe": describe, "write": write})
