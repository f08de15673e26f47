"""He et al. 2022: its systems by name, and its tables and figures from a folder of runs."""
