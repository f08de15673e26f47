"""Networks around Hugging Face models, one contract a file: masked models, and how any of them is opened."""

from diffusionbert.networks.base import Backed, Network, ask
from diffusionbert.networks.loading import load_causal_lm, load_masked_lm, quiet
from diffusionbert.networks.masked import Denoiser

__all__ = ["Backed", "Denoiser", "Network", "ask", "load_causal_lm", "load_masked_lm", "quiet"]
