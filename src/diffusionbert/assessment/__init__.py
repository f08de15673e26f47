"""What is said of a trained model: likelihoods of every kind, samples beside real sentences, judges, diagnoses."""
