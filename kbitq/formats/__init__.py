"""Weights in other tools' formats: recognised by names and config, decoded to the values that those tools compute."""
