"""Objectives, one paper per file: configuration, objective, default sampler and scoring quantities."""
