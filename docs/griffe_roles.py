"""Docstrings are read as Markdown; the few roles they use for names become plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data):`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """``:class:`~cdpg.models.base.LanguageModel` `` reads as ``LanguageModel``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
