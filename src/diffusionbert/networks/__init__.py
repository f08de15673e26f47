"""Networks around Hugging Face models: masked ones, decoders, and those on vectors; and how any of them is opened."""

from diffusionbert.networks.base import Backed, Network, ask
from diffusionbert.networks.causal import CausalModel, CausalNetwork, make_room, new_decoder
from diffusionbert.networks.loading import is_causal, load_causal_lm, load_masked_lm, new_lm
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.vectors import EmbeddingDenoiser, VectorNetwork

__all__ = [
    "Backed",
    "CausalModel",
    "CausalNetwork",
    "Denoiser",
    "EmbeddingDenoiser",
    "Network",
    "VectorNetwork",
    "ask",
    "is_causal",
    "load_causal_lm",
    "load_masked_lm",
    "make_room",
    "new_decoder",
    "new_lm",
]
