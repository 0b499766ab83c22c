"""Results for people: reads runs and is read by nobody but the commands.

- ``html``: `write_report`, the page of a run, from its sections ``contenders``, ``course``,
  ``privacy`` and ``samples``, with ``words`` and ``template.html.j2``;
- ``tables``: what the terminal shows;
- ``convergence``: several runs in one picture;
- ``plots``: the drawings of the page; ``standalone``: drawings as files; ``svg``: their parts;
- ``units``: figures as people read them.
"""
