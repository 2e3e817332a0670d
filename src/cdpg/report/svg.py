"""Adapts Matplotlib's SVG to a page with a strict content-security policy, and makes it smaller.

Style attributes, which such a policy forbids, become presentation attributes; the style element, the metadata
and the document type are removed; identifiers are made unique by the figure's name; numbers keep two decimals.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

FONT = "system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_BOLD = re.compile(r"\b(?:bold|[6-9]00)\b")
_SIZE = re.compile(r"([\d.]+)px")
_DEFAULTS = {("stroke-linejoin", "round"), ("stroke-linecap", "butt"), ("opacity", "1"), ("fill-opacity", "1")}
_UNWANTED = {"font-family", "font", "font-style", "font-variant", "font-weight", "font-stretch"}


def fit_for_page(source: bytes, name: str, title: str) -> str:
    """One ``svg`` element, to be put into HTML as it is."""
    root = ElementTree.fromstring(source)
    _drop(root)
    for element in root.iter():
        _restyle(element)
        _rename(element, name)
        for key in ("d", "x", "y", "width", "height", "transform", "points"):
            if key in element.attrib and element is not root:
                element.set(key, _NUMBER.sub(_rounded, element.attrib[key]).replace("\n", " ").strip())
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if element.tag != f"{_SVG}text":
            element.text = None if not (element.text or "").strip() else element.text
        element.tail = None
        element.tag = element.tag.removeprefix(_SVG)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    label = ElementTree.Element("title")
    label.text = title
    root.insert(0, label)
    root.attrib.update({"xmlns": _SVG[1:-1], "role": "img", "aria-label": title, "font-family": FONT})
    root.attrib.update({"stroke-linejoin": "round", "stroke-linecap": "butt"})
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _drop(parent: ElementTree.Element) -> None:
    for child in list(parent):
        if child.tag in (f"{_SVG}metadata", f"{_SVG}style", f"{_SVG}title"):
            parent.remove(child)
        else:
            _drop(child)
            if child.tag == f"{_SVG}defs" and not len(child):
                parent.remove(child)


def _restyle(element: ElementTree.Element) -> None:
    """``style="fill: red"`` becomes ``fill="red"``."""
    for declaration in element.attrib.pop("style", "").split(";"):
        key, colon, value = (part.strip() for part in declaration.partition(":"))
        if key in ("font", "font-weight") and _BOLD.search(value):
            element.set("font-weight", "600")
        if key == "font":
            size = _SIZE.search(value)
            if size:
                element.set("font-size", size[1])
        elif colon and key not in _UNWANTED and (key, value) not in _DEFAULTS:
            element.set(key, value.removesuffix("px") if key in ("font-size", "stroke-width") else value)


def _rename(element: ElementTree.Element, name: str) -> None:
    """Put the figure's name before every identifier, also before those that nothing refers to."""
    link = element.attrib.pop(_LINK, None)
    if link is not None:
        element.set("href", f"#{name}-{link.removeprefix('#')}")
    if "id" in element.attrib:
        if element.tag == f"{_SVG}g":
            del element.attrib["id"]
        else:
            element.set("id", f"{name}-{element.attrib['id']}")
    clip = element.attrib.get("clip-path")
    if clip is not None:
        element.set("clip-path", clip.replace("url(#", f"url(#{name}-"))


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
