"""What inference servers share: weights that arrive tensor by tensor, cut for a device, and products with them."""
