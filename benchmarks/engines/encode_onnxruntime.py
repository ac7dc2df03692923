"""ONNX Runtime with the same weights: Hugging Face's BertModel, exported for the shape of the work."""

import torch
from torch import Tensor, nn

from benchmarks.engines.encode_transformers import model
from benchmarks.engines.encode_work import Encode, Work, mean, padded, serve_encoding
from benchmarks.engines.speaking import MissingPeerError, scratch_folder


def build(work: Work) -> tuple[Encode, dict[str, str]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch exports by it
    except ImportError:
        raise MissingPeerError("ONNX Runtime is not installed (pip install onnxruntime onnxscript)") from None
    peer, versions = model(work)

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peer = peer

        def forward(self, ids: Tensor) -> Tensor:
            return self.peer(ids).last_hidden_state

    if work.shortest != work.longest:
        raise MissingPeerError("texts of equal length alone are exported for it")
    file, given = scratch_folder() / "model.onnx", padded(work.texts()[: work.batch])[0]
    torch.onnx.export(States(), (given,), str(file), dynamo=True, input_names=["ids"], verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = work.threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[list[int]]) -> Tensor:
        found = []
        for start in range(0, len(texts), work.batch):
            ids, attention_mask = padded(texts[start : start + work.batch])
            found.append(mean(torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0]), attention_mask))
        return torch.cat(found)

    return encode, {**versions, "onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    serve_encoding(build)
