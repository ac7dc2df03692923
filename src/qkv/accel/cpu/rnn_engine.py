"""Decode engine for recurrent encoder–decoders on a CPU, whose linear layers use prepacked weights."""

from torch import Tensor, nn

from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.accel.swap import ModuleSwap, share_attributes
from qkv.generation.decode_engine import RNNDecodeEngine, RowIds, SequenceIndices, TokenLists
from qkv.generation.sampling import NextLogits
from qkv.models import RNNSeq2Seq
from qkv.nn import Unembedding
from qkv.tensors import Logits


class PrepackedLinear(nn.Linear):
    """Replacement for a linear layer that multiplies with prepacked weights."""

    __slots__ = ("prepacked",)
    prepacked: PrepackedWeights

    def forward(self, x: Tensor) -> Tensor:
        return self.prepacked.packed_linear(self)(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class PrepackedUnembedding(Unembedding):
    """Replacement for an unembedding that multiplies with prepacked weights."""

    __slots__ = ("prepacked",)
    prepacked: PrepackedWeights

    def forward(self, x: Tensor) -> Logits:
        x = x * self.scale if self.scale != 1.0 else x
        return self.logits(self.prepacked.packed_linear(self)(x.flatten(0, -2)).unflatten(0, x.shape[:-1]))


class CPURNNEngine:
    """Eager engine whose decoder runs with prepacked linear layers."""

    def __init__(self, model: RNNSeq2Seq, eager: RNNDecodeEngine, prepacked: PrepackedWeights) -> None:
        self._eager = eager
        replaced = {*model.decoder.modules(), model.unembedding}

        def find_replacement(_: nn.Module, module: nn.Module) -> nn.Module | None:
            if module not in replaced or type(module) not in (nn.Linear, Unembedding):
                return None
            kind = PrepackedLinear if isinstance(module, nn.Linear) else PrepackedUnembedding
            replacement = share_attributes(module, kind)
            replacement.prepacked = prepacked
            return replacement

        self._prepacked_linears = ModuleSwap(model, find_replacement)

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        with self._prepacked_linears:
            return self._eager.prefill(prompts, sources=sources)

    def decode(self, ids: RowIds) -> NextLogits:
        with self._prepacked_linears:
            return self._eager.decode(ids)

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        self._eager.reorder(rows, sequences=sequences, common_prefix=common_prefix)

    def close(self) -> None:
        self._eager.close()
