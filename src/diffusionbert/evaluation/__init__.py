"""Evaluation: likelihoods, text metrics, judges, one typed result, comparisons and diagnosis."""
