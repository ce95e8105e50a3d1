"""What a quantization is worth: perplexity and divergence on a text, and text generated from a model."""
