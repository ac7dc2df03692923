"""Run `encode` from sentence-transformers, which also sorts the texts by length."""

import torch
from torch import Tensor

from benchmarks.engines.embed_workload import Embedder, model_folder, serve_embedding
from benchmarks.engines.protocol import EngineRequest, MissingPeerError


def build(options: EngineRequest) -> Embedder:
    try:
        import sentence_transformers
        import transformers
    except ImportError as missing:
        raise MissingPeerError(f"sentence-transformers is not fully installed ({missing})") from None
    model = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu")

    def embed(texts: list[str]) -> Tensor:
        vectors = model.encode(texts, batch_size=options["batch"], show_progress_bar=False)
        return torch.as_tensor(vectors)

    versions = {
        "sentence-transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
    }
    return Embedder(embed=embed, versions=versions)


if __name__ == "__main__":
    serve_embedding(build)
