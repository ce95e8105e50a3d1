"""How a weight is coded: levels, fits, and the specification as a program."""
