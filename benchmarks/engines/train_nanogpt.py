"""Run nanoGPT training steps with its model, its optimizer and the loop from its train.py.

The option `fused` selects the fused AdamW, which nanoGPT uses only on GPUs. The option `compiled` compiles the model as
train.py does.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import nanogpt
from benchmarks.engines.next_token_workload import TrainingEngine, Workload, serve_training


def build(workload: Workload, options: dict[str, Any]) -> TrainingEngine:
    folder = nanogpt.find(options["peers"])
    module = nanogpt.load(folder)
    config = module.GPTConfig(
        block_size=workload.context_length,
        vocab_size=workload.vocab_size,
        n_layer=workload.n_layers,
        n_head=workload.n_heads,
        n_embd=workload.d_model,
        dropout=0.0,
        bias=workload.bias,
    )
    model = module.GPT(config).train()
    with torch.no_grad():
        for name, inputs in workload.initial_weights().items():
            is_turned = ".h." in name and inputs.ndim == 2
            model.get_parameter(name).copy_(inputs.T if is_turned else inputs)
    model.to(workload.device)
    betas = (workload.beta1, workload.beta2)
    # nanoGPT uses fused AdamW only on GPUs, but torch now supports it on CPUs as well.
    device_type = "cuda" if options.get("fused") else "cpu"
    optimizer = model.configure_optimizers(workload.weight_decay, workload.learning_rate, betas, device_type)
    run = torch.compile(model) if options.get("compiled") else model

    is_gpu = workload.device == "cuda"
    if is_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        ids, targets = (inputs.to(workload.device, non_blocking=True) for inputs in (ids, targets))
        with torch.autocast(workload.device, dtype=torch.bfloat16, enabled=is_gpu):
            _, loss = run(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() if is_gpu else loss.item()

    return TrainingEngine(step=step, versions={"nanoGPT": nanogpt.version(folder)})


if __name__ == "__main__":
    serve_training(build)
