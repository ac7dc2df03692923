"""Train a Hugging Face GPT2LMHeadModel in a plain training loop with fused AdamW."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engines.next_token_workload import TrainingEngine, Workload, serve_training
from benchmarks.engines.protocol import MissingPeerError


def build(workload: Workload, options: dict[str, Any]) -> TrainingEngine:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    config = transformers.GPT2Config(
        vocab_size=workload.vocab_size,
        n_positions=workload.context_length,
        n_embd=workload.d_model,
        n_layer=workload.n_layers,
        n_head=workload.n_heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    _load_weights(model, workload)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": workload.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (workload.beta1, workload.beta2)
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=workload.learning_rate, betas=betas, fused=True
    )
    run = torch.compile(model) if options.get("compiled") else model

    def step(ids: Tensor, targets: Tensor) -> float:
        logits = run(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return TrainingEngine(step=step, versions={"transformers": transformers.__version__})


def _load_weights(model: nn.Module, workload: Workload) -> None:
    """Copy the initial weights into the model.

    The model cannot omit biases, so biases that the workload does not have are fixed at zero.
    """
    inputs = workload.initial_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in inputs:
                parameter.copy_(inputs[name])
            else:
                parameter.zero_()
                parameter.requires_grad = False


if __name__ == "__main__":
    serve_training(build)
