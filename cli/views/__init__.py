"""What a screen shows."""
