"""Could these tensors fill that model? Asked before anything is allocated, for a config can say any number."""

from collections.abc import Mapping

from torch import Tensor

from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import parameters
from qkv.errors import WeightsError
from qkv.models import Model, build


def build_to_fill(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """The model with random weights; refused where the tensors are too few by far for it.

    What is missing in part is left to `fill`, which lists it.
    """
    is_pair = isinstance(config, Seq2SeqConfig | RNNConfig)
    n_layers = config.n_encoder_layers + config.n_decoder_layers if is_pair else config.n_layers
    if n_layers > len(tensors):
        raise WeightsError(f"the config has {n_layers:,} layers, and there are {len(tensors):,} tensors")
    n_needed, n_held = parameters(config).total, sum(tensor.numel() for tensor in tensors.values())
    if n_needed > 2 * n_held:
        raise WeightsError(f"the config describes {n_needed:,} parameters, and the tensors hold {n_held:,} numbers")
    return build(config)
