"""The prompts of role-play that are no judge format: templates of ours, in ``nlhf/assets/roleplay``.

Station of the path: scene -> **messages** -> Generator.
"""

import functools
from pathlib import Path

import jinja2

FOLDER = Path(__file__).parents[1] / "assets" / "roleplay"


@functools.cache
def template(name: str) -> jinja2.Template:
    """A prompt by its path within `FOLDER`, such as ``coser/judge.jinja``."""
    environment = jinja2.Environment(  # plain text: nothing is escaped
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
