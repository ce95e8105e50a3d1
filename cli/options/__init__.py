"""Options and arguments, each written once."""
