"""sentence-transformers' own `encode`, which sorts by length too."""

import torch
from torch import Tensor

from benchmarks.engines.embed_work import Embedder, model_folder, serve_embedding
from benchmarks.engines.speaking import MissingPeerError, Question


def build(options: Question) -> Embedder:
    try:
        import sentence_transformers
        import transformers
    except ImportError as missing:
        raise MissingPeerError(f"sentence-transformers is not installed whole ({missing})") from None
    model = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu")

    def embed(texts: list[str]) -> Tensor:
        vectors = model.encode(texts, batch_size=options["batch"], show_progress_bar=False)
        return torch.as_tensor(vectors)

    versions = {
        "sentence-transformers": sentence_transformers.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    return Embedder(embed=embed, versions=versions)


if __name__ == "__main__":
    serve_embedding(build)
