"""Where runs are carried out. An executor takes runs and calls back; it knows nothing of what a run does."""
