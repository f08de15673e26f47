"""From text files to batches of token ids and back. Strings end here: the layers below see tensors only."""
