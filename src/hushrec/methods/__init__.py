"""Methods: one file a paper, over the interface in `methods.base`."""
