"""transformers: ``quant_method: kbitq``, loading, quantizing on the fly, saving. Importing this imports none of it."""
