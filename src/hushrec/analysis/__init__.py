"""Analyses of finished runs: item tables, user groups, single users, item maps."""
