"""Generation, infilling and scoring with a loaded model."""
