"""Provisioning: the folders, keys, certificates and configuration of server and nodes."""
