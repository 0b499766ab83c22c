"""The tables and figures of the papers, and of studies of our own, measured through one runner.

- ``plan``: an `Exhibit` is a table or figure, read from a TOML file; its cells are commands;
- ``results``: what the commands gave, filed under the command itself;
- ``measure``: runs one command and says what came out;
- ``runner``: runs what is not done, within a budget.
"""
