"""A trained model in use: recommendation, fold-in, and bundles for devices."""
