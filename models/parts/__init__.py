"""Building blocks of the models: the base class of mixers, norms, channel mixers, positions, filters."""
