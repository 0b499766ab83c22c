"""Flower as the transport: the only package that imports it, and the processes it runs as."""
