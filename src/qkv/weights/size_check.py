"""Check that tensors are large enough for a config before allocating the model."""

from collections.abc import Mapping

from torch import Tensor

from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import count_parameters
from qkv.errors import WeightsError
from qkv.models import Model, build


def build_unless_config_exceeds_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """Build a randomly initialized model, or raise an error if there are far too few tensors for the config.

    A config can contain arbitrary numbers, so an unchecked config could allocate an arbitrary amount of memory.
    Individual missing tensors are not detected here. `load_into` lists them.
    """
    is_encoder_decoder = isinstance(config, Seq2SeqConfig | RNNConfig)
    n_layers = config.n_encoder_layers + config.n_decoder_layers if is_encoder_decoder else config.n_layers
    if n_layers > len(tensors):
        raise WeightsError(f"the config specifies {n_layers:,} layers, but there are only {len(tensors):,} tensors")
    n_expected, n_elements = count_parameters(config).total, sum(tensor.numel() for tensor in tensors.values())
    if n_expected > 2 * n_elements:
        raise WeightsError(
            f"the config specifies {n_expected:,} parameters, but the tensors contain only {n_elements:,} elements"
        )
    return build(config)
