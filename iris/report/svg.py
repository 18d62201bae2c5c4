"""Pictures as SVG: a file of its own, or an element of a page that follows the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.linewidth": 0.8,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
"""Text stays text; it is laid out with the metrics of DejaVu Sans, which is wider than most fonts of browsers."""

_REFERENCE = re.compile(r"url\(#([^)]+)\)|^#(.+)$")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
"""Characters that XML cannot hold."""
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def text_of(figure: Figure, name: str) -> str:
    """The figure as an SVG file. The same figure and ``name`` give the same text."""
    file = io.StringIO()
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", file.getvalue())


def inlined(text: str, label: str, variables: Mapping[str, str]) -> str:
    """An SVG file as an element of an HTML page.

    Args:
        text: the file.
        label: what the picture shows, in words.
        variables: the CSS variable that replaces each colour.
    """
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): value for name, value in element.attrib.items()}
        if "style" in element.attrib:
            element.set("style", _COLOUR.sub(lambda match: variables.get(match[0], match[0]), element.attrib["style"]))
        if "d" in element.attrib:  # paths outside the picture have none
            element.set("d", " ".join(element.attrib["d"].split()))
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    used = {name for element in root.iter() for value in element.attrib.values() for name in _references(value)}
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
        element.text, element.tail = _squeezed(element.text), _squeezed(element.tail)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _references(value: str) -> list[str]:
    return [first or second for first, second in _REFERENCE.findall(value)]


def _squeezed(text: str | None) -> str | None:
    return text if text is None or text.strip() else ""
