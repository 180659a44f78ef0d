"""Many trainings from one description: a grid, a list or a random draw of options; results as tables."""
