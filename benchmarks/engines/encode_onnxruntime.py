"""Run ONNX Runtime with the same weights, using a Hugging Face BertModel that is exported for the workload's shape."""

import torch
from torch import Tensor, nn

from benchmarks.engines.encode_transformers import model
from benchmarks.engines.encode_workload import EncodeFunction, Workload, mean_pool, pad_batch, serve_encoding
from benchmarks.engines.protocol import MissingPeerError, temporary_folder


def build(workload: Workload) -> tuple[EncodeFunction, dict[str, str]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - required by torch.onnx.export
    except ImportError:
        raise MissingPeerError("ONNX Runtime is not installed (pip install onnxruntime onnxscript)") from None
    peer, versions = model(workload)

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.peer = peer

        def forward(self, ids: Tensor) -> Tensor:
            return self.peer(ids).last_hidden_state

    if workload.shortest != workload.longest:
        raise MissingPeerError("only texts of equal length are supported")
    file, inputs = temporary_folder() / "model.onnx", pad_batch(workload.texts()[: workload.batch])[0]
    torch.onnx.export(States(), (inputs,), str(file), dynamo=True, input_names=["ids"], verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = workload.threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[list[int]]) -> Tensor:
        result = []
        for start in range(0, len(texts), workload.batch):
            ids, attention_mask = pad_batch(texts[start : start + workload.batch])
            result.append(mean_pool(torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0]), attention_mask))
        return torch.cat(result)

    return encode, {**versions, "onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    serve_encoding(build)
