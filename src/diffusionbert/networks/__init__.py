"""Networks around Hugging Face models: masked, causal and on word vectors, and how the time reaches them."""
