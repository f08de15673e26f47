"""Estimates of likelihoods with intervals, kinds and protocols."""
