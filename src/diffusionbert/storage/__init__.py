"""Files on disk: atomic writes, JSON with a schema, safetensors, and what comes from the Hub."""
