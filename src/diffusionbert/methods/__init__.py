"""Objectives, one paper per file: configuration and objective."""
