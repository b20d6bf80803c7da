"""What the models are made of: the base class of mixers, norms, channel mixers, positions, filters."""
