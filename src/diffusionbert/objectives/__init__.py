"""Objectives: how a network is trained and by which quantities its text is scored."""
