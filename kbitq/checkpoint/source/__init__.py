"""Reading a checkpoint: where its bytes come from, what its headers say, its tensors tile by tile."""
