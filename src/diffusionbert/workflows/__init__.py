"""Tasks that use several of the other folders."""
