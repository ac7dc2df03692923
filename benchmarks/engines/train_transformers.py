"""Hugging Face's GPT2LMHeadModel in a plain loop with fused AdamW."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engines.next_token_work import Built, Work, serve_training
from benchmarks.engines.speaking import MissingPeerError


def build(work: Work, options: dict[str, Any]) -> Built:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    config = transformers.GPT2Config(
        vocab_size=work.vocab_size,
        n_positions=work.context_length,
        n_embd=work.d_model,
        n_layer=work.n_layers,
        n_head=work.n_heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    _fill(model, work)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": work.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (work.beta1, work.beta2)
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=work.learning_rate, betas=betas, fused=True)
    run = torch.compile(model) if options.get("compiled") else model

    def step(ids: Tensor, targets: Tensor) -> float:
        logits = run(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Built(step=step, versions={"transformers": transformers.__version__})


def _fill(model: nn.Module, work: Work) -> None:
    """The work's weights; biases that the work does not have are held at zero, as this model cannot leave them out."""
    given = work.first_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in given:
                parameter.copy_(given[name])
            else:
                parameter.zero_()
                parameter.requires_grad = False


if __name__ == "__main__":
    serve_training(build)
