"""Settings: reads grids, and turns every point of a grid into a run that can work."""
