"""Writing a checkpoint: which byte of which file, in a hidden folder first, with checksums."""
