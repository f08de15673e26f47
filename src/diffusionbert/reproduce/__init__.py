"""The paper's tables and figures from a folder of runs."""
