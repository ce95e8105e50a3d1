"""Quantizing weights that are in memory, or on their way there, as ``kbitq quantize`` quantizes a checkpoint."""
