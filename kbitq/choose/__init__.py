"""Which tensors are quantized, with how many bits, and why: from names, sizes, rules, budgets and importance."""
