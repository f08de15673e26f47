"""From files to token sequences and back: corpora, tokenizers, encoded datasets and canvases."""
