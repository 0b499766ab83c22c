"""Finished runs looked at again, one by one or side by side; nothing is trained."""
