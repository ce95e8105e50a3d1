"""Carrying a plan out: passes over the tensors, on CPU and GPU, that go on where an interrupted run got."""
