"""Random bad input to everything that reads what others wrote. See `fuzz.run`."""
