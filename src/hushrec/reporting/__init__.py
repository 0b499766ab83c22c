"""Results for people: pages, tables and plots of finished runs.

- ``html``: `write_report`, `write_comparison`; from ``baselines`` (the method beside the baselines)
  and ``sections`` (the other sections of a page), with the templates ``*.html.j2``;
- ``tables``: tables for the terminal; numbers, units and names as people read them;
- ``plots``: drawings of the pages and as files.
"""
