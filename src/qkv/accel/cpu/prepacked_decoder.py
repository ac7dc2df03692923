"""Prepacked linear layers for the decoder of a recurrent encoder–decoder on a CPU."""

from torch import Tensor, nn

from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.accel.swap import ModuleSwap, share_attributes
from qkv.models import RNNSeq2Seq
from qkv.nn import Unembedding
from qkv.tensors import Logits


class PrepackedLinear(nn.Linear):
    """Linear layer that multiplies with prepacked weights."""

    __slots__ = ("prepacked",)
    prepacked: PrepackedWeights

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return self.prepacked.packed_linear(self)(input.flatten(0, -2)).unflatten(0, input.shape[:-1])


class PrepackedUnembedding(Unembedding):
    """Unembedding that multiplies with prepacked weights."""

    __slots__ = ("prepacked",)
    prepacked: PrepackedWeights

    def forward(self, x: Tensor) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(self.prepacked.packed_linear(self)(x.flatten(0, -2)).unflatten(0, x.shape[:-1]))


def prepacked_decoder(model: RNNSeq2Seq, prepacked: PrepackedWeights) -> ModuleSwap:
    """Return a context manager that replaces the linear layers of the decoder with prepacked ones."""
    replaced = {*model.decoder.modules(), model.unembedding}

    def find_replacement(module: nn.Module) -> nn.Module | None:
        if module not in replaced or type(module) not in (nn.Linear, Unembedding):
            return None
        kind = PrepackedLinear if isinstance(module, nn.Linear) else PrepackedUnembedding
        replacement = share_attributes(module, kind)
        replacement.prepacked = prepacked
        return replacement

    return ModuleSwap(model, find_replacement)
