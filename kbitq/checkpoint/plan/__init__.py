"""What a run will do, from headers alone."""
