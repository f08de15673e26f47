"""DiffusionBERT: masked language models that write, by absorbing discrete diffusion (He et al. 2022)."""

import os

__version__ = "0.1.0.dev0"

# Threads that wait by spinning take the core from those that work: on a busy machine of two cores, four times slower.
# It must be said before torch starts; who sets it otherwise has the last word.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
