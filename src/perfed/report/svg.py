"""A chart as SVG inside a page: its colours follow the page, its marks say what they are."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from perfed.report.charts import Chart
from perfed.report.theme import VARIABLES

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_NAMES = {light: f"var({name})" for name, (light, _) in VARIABLES.items()}
_MARKS = {f"{{{_SVG}}}{tag}" for tag in ("use", "path", "image")}


def inline_svg(chart: Chart) -> str:
    import matplotlib as mpl

    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": chart.name}):  # other charts on the page have other ids
        chart.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314 - matplotlib's, of just now
    metadata = root.find(f"{{{_SVG}}}metadata")
    if metadata is not None:
        root.remove(metadata)
    _add_tips(root, chart)
    _prefix_ids(root, chart.name)
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", _in_page_colours(element.attrib["style"]))
    for size in ("width", "height"):
        del root.attrib[size]
    root.set("role", "img")
    root.set("aria-label", chart.title)
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(r">\s+<", "><", text)


def _add_tips(root: ElementTree.Element, chart: Chart) -> None:
    """Each mark gets its text. A text too many or too few would be somebody else's."""
    groups = {element.get("id"): element for element in root.iter()}
    for name, texts in chart.tips.items():
        marks = list(_marks(groups[name])) if name in groups else []
        if len(marks) != len(texts):
            raise AssertionError(f"{name}: {len(marks)} marks and {len(texts)} texts")
        for mark, text in zip(marks, texts, strict=True):
            mark.set("data-tip", text)


def _marks(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    if element.tag in _MARKS:
        yield element
    for child in element:
        if child.tag != f"{{{_SVG}}}defs":
            yield from _marks(child)


def _prefix_ids(root: ElementTree.Element, name: str) -> None:
    """Of all ids only those that are referred to, and they are this chart's own."""
    links = (f"{{{_XLINK}}}href", "clip-path")
    used = {
        match
        for element in root.iter()
        for link in links
        for match in re.findall(r"#([^)\"]+)", element.get(link, ""))
    }
    for element in root.iter():
        if (own := element.get("id")) is not None:
            if own in used:
                element.set("id", f"{name}-{own}")
            else:
                del element.attrib["id"]
        for link in links:
            if "#" in element.get(link, "") and not element.get(link, "").startswith("data:"):
                element.set(link, element.attrib[link].replace("#", f"#{name}-"))


def _in_page_colours(style: str) -> str:
    style = re.sub(r"#[0-9a-f]{6}", lambda found: _NAMES.get(found[0], found[0]), style)
    # The page's own font; sizes and weights stay.
    return re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", style)
