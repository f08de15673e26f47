"""The mathematics of diffusion on tokens: schedules, processes and what they know of the vocabulary."""
