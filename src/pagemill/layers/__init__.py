"""The parts of a decoder: weights together with the op calls that use them. They never name a device."""
