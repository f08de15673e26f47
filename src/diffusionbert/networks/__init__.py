"""Networks around Hugging Face models (masked, causal, over word vectors), and how these models are opened."""

from diffusionbert.networks.base import Backed, Network, ask
from diffusionbert.networks.causal import CausalModel, CausalNetwork, make_room, new_decoder
from diffusionbert.networks.legacy_checkpoint import load_legacy_checkpoint
from diffusionbert.networks.loading import is_causal, load_causal_lm, load_masked_lm, new_lm, require_reopenable
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
    "load_legacy_checkpoint",
    "load_masked_lm",
    "make_room",
    "new_decoder",
    "new_lm",
    "require_reopenable",
]
