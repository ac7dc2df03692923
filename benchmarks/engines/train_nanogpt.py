"""nanoGPT's training step: its model and its optimizer, in the loop its train.py has.

Options: `fused` takes the fused AdamW, which its own setting leaves to GPUs; `compiled` as its train.py does.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import nanogpt
from benchmarks.engines.next_token_work import Built, Work, serve_training


def build(work: Work, options: dict[str, Any]) -> Built:
    folder = nanogpt.find(options["peers"])
    module = nanogpt.load(folder)
    config = module.GPTConfig(
        block_size=work.context_length,
        vocab_size=work.vocab_size,
        n_layer=work.n_layers,
        n_head=work.n_heads,
        n_embd=work.d_model,
        dropout=0.0,
        bias=work.bias,
    )
    model = module.GPT(config).train()
    with torch.no_grad():
        for name, given in work.first_weights().items():
            is_turned = ".h." in name and given.ndim == 2
            model.get_parameter(name).copy_(given.T if is_turned else given)
    model.to(work.device)
    betas = (work.beta1, work.beta2)
    # Its rule is: fused if the device is a GPU. Fused AdamW has come to CPUs since.
    device_type = "cuda" if options.get("fused") else "cpu"
    optimizer = model.configure_optimizers(work.weight_decay, work.learning_rate, betas, device_type)
    run = torch.compile(model) if options.get("compiled") else model

    is_gpu = work.device == "cuda"
    if is_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        ids, targets = (given.to(work.device, non_blocking=True) for given in (ids, targets))
        with torch.autocast(work.device, dtype=torch.bfloat16, enabled=is_gpu):
            _, loss = run(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() if is_gpu else loss.item()

    return Built(step=step, versions={"nanoGPT": nanogpt.version(folder)})


if __name__ == "__main__":
    serve_training(build)
