"""Settings: reads grids and what a user types, and turns every point of a grid into a run that can work."""
