"""Forward processes and their reverse steps in closed form, one kind of noise per file.

A process does not depend on how f is computed, and **`reverse` cannot see x0**: it has no such argument. No V×V matrix
and no one-hot tensor is ever made; the tests compare the closed forms with such matrices.
"""

from diffusionbert.processes.absorbing import Absorbing, LearnedExponents
from diffusionbert.processes.base import Process, Shape
from diffusionbert.processes.gaussian import Gaussian
from diffusionbert.processes.uniform import Uniform

__all__ = ["Absorbing", "Gaussian", "LearnedExponents", "Process", "Shape", "Uniform"]
