"""Check that a weights file is large enough for its config before allocating memory for the model."""

from collections.abc import Mapping

from torch import Tensor

from qkv.config import ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import count_parameters
from qkv.errors import WeightsError
from qkv.models import Model, build


def build_unless_config_exceeds_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """Build a randomly initialized model, or raise an error if the config is far too large for the tensors.

    The numbers in a config are arbitrary, so building a model from an unchecked config could allocate any amount of
    memory. This function does not detect individual missing tensors, which `load_into` lists.
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
