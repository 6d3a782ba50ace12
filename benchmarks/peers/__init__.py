"""Other engines on the same work, from the packages that they publish."""
