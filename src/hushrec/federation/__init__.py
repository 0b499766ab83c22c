"""A round of training, wherever the clients are: setup, client, rounds, messages and backends."""
