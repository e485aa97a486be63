"""A workflow's graph as an SVG drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from saga_core.aeg import END_ID, START_ID
from saga_gateway.graph_layout import (
    NODE_HEIGHT,
    NODE_WIDTH,
    Layout,
    Point,
    lay_out,
)
from saga_gateway.markup import Markup, joined, markup
from saga_gateway.units import percent, seconds

MAX_NODES = 40
MAX_EDGES = 120

_LABEL_HEIGHT = 17.0
_CHAR_WIDTH = 6.3
_NAME_CHARS = 22
# Along its edge a label stands at the first of these places where it covers no other.
_SHARES = (0.5, 0.38, 0.62, 0.28, 0.72, 0.2, 0.8)


@dataclass(frozen=True, slots=True)
class Arrow:
    """An edge as it is drawn; ``pause``: P50 and P95 of the pause before the next step."""

    source: str
    target: str
    probability: float
    is_used: bool
    pause: str

    @property
    def label(self) -> str:
        """What stands at it."""
        chance = percent(self.probability)
        return f"{chance} · {self.pause}" if self.pause else chance


def arrows_of(graph: dict[str, Any], theta_conf: float = 0.7) -> list[Arrow]:
    """The edges of a graph as ``aeg.to_dict`` gives it, those to its end among them, the likeliest
    first."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    arrows = [
        Arrow(
            edge["from"],
            edge["to"],
            edge["probability"],
            bool(edge["is_used"]),
            pause_text(nodes.get(edge["from"])),
        )
        for edge in graph["edges"]
    ]
    arrows += [
        Arrow(name, END_ID, node["p_end"], node["p_end"] >= theta_conf, "")
        for name, node in nodes.items()
        if node["p_end"] > 0.0
    ]
    return sorted(arrows, key=lambda each: (-each.probability, each.source, each.target))


def pause_text(node: dict[str, Any] | None) -> str:
    """The node's pause, P50 / P95; empty where it is not known."""
    if node is None or node["pause_p50_s"] is None or node["pause_p95_s"] is None:
        return ""
    return f"{seconds(node['pause_p50_s'])} / {seconds(node['pause_p95_s'])}"


def draw(graph: dict[str, Any]) -> tuple[Markup, str]:
    """The drawing, and in words what it leaves out for want of room.

    The nodes that were seen most are drawn, and of their edges the likeliest.
    """
    chosen = sorted(graph["nodes"], key=lambda node: (-node["count"], node["id"]))[:MAX_NODES]
    kept = {node["id"] for node in chosen}
    nodes = [node for node in graph["nodes"] if node["id"] in kept]
    ends = {START_ID, END_ID} | kept
    arrows = arrows_of(graph)
    shown = [each for each in arrows if each.source in ends and each.target in ends][:MAX_EDGES]
    names = [START_ID, *(node["id"] for node in nodes), END_ID]
    layout = lay_out(names, [(each.source, each.target) for each in shown])
    left_out = len(graph["nodes"]) - len(nodes), len(arrows) - len(shown)
    words = f"{left_out[0]} nodes and {left_out[1]} edges are not drawn." if any(left_out) else ""
    lines, labels = _edges(layout, shown)
    svg = markup(
        '<svg class="graph" role="img" aria-label="{title}" viewBox="0 0 {width} {height}" '
        'width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/>'
        "</marker></defs>{lines}{boxes}{labels}</svg>\n",
        title=f"graph of {graph['workflow']}",
        width=f"{layout.width:.0f}",
        height=f"{layout.height:.0f}",
        lines=lines,
        boxes=_boxes(layout, nodes),
        labels=labels,
    )
    return svg, words


def _boxes(layout: Layout, nodes: Iterable[dict[str, Any]]) -> Markup:
    boxes = [
        markup(
            '<g class="end"><circle cx="{x}" cy="{y}" r="17"/>'
            '<text x="{x}" y="{text_y}">{name}</text></g>',
            x=_px(layout.centres[name][0]),
            y=_px(layout.centres[name][1]),
            text_y=_px(layout.centres[name][1] + 4),
            name=name.strip("<>"),
        )
        for name in (START_ID, END_ID)
    ]
    for node in nodes:
        x, y = layout.centres[node["id"]]
        tool = "no tool" if node["tool"] is None else _short(node["tool"])
        name, second = node["agent"] or "step", f"{tool} {pause_text(node)}"
        boxes.append(
            markup(
                '<g class="node"><title>{title}</title>'
                '<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="7"/>'
                '<text x="{x}" y="{first_y}">{name}</text>'
                '<text class="tool" x="{x}" y="{second_y}">{second}</text></g>',
                title=f"{node['id']}: seen {node['count']:.0f} times",
                left=_px(x - NODE_WIDTH / 2),
                top=_px(y - NODE_HEIGHT / 2),
                width=_px(NODE_WIDTH),
                height=_px(NODE_HEIGHT),
                x=_px(x),
                first_y=_px(y - 3),
                second_y=_px(y + 14),
                name=_short(name),
                second=second,
            )
        )
    return joined(boxes)


def _edges(layout: Layout, arrows: Sequence[Arrow]) -> tuple[Markup, Markup]:
    lines, labels = [], []
    taken = [
        (x - NODE_WIDTH / 2, y - NODE_HEIGHT / 2, x + NODE_WIDTH / 2, y + NODE_HEIGHT / 2)
        for x, y in layout.centres.values()
    ]
    for arrow in arrows:
        width = len(arrow.label) * _CHAR_WIDTH + 6
        if arrow.source == arrow.target:
            path, at = _loop(layout.centres[arrow.source], width)
            places = [at]
        else:
            points = layout.routes[arrow.source, arrow.target]
            path, places = _path(points), [_along(points, share) for share in _SHARES]
        lines.append(
            markup(
                '<path class="edge {kind}" d="{path}" marker-end="url(#arrow)">'
                "<title>{title}</title></path>",
                kind="used" if arrow.is_used else "unused",
                path=path,
                title=f"{arrow.source} to {arrow.target}: {arrow.label}",
            )
        )
        box = _free_box(places, width, taken)
        taken.append(box)
        labels.append(
            markup(
                '<g class="label"><rect x="{left}" y="{top}" width="{width}" height="{height}"/>'
                '<text x="{x}" y="{y}">{text}</text></g>',
                left=_px(box[0]),
                top=_px(box[1]),
                width=_px(width),
                height=_px(_LABEL_HEIGHT),
                x=_px((box[0] + box[2]) / 2),
                y=_px(box[1] + 12.5),
                text=arrow.label,
            )
        )
    return joined(lines), joined(labels)


Box = tuple[float, float, float, float]


def _free_box(places: Sequence[Point], width: float, taken: Sequence[Box]) -> Box:
    """The label's box at the first place where it covers nothing; else at the first place."""
    boxes = [
        (x - width / 2, y - _LABEL_HEIGHT / 2, x + width / 2, y + _LABEL_HEIGHT / 2)
        for x, y in places
    ]
    free = (
        box
        for box in boxes
        if not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
            for other in taken
        )
    )
    return next(free, boxes[0])


def _path(points: Sequence[Point]) -> str:
    """A curve through the points that leaves and meets each of them upright."""
    (x, y), *others = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in others:
        middle = (y + to_y) / 2
        parts.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(parts)


def _along(points: Sequence[Point], share: float) -> Point:
    """A point of the curve."""
    place = share * (len(points) - 1)
    at = min(int(place), len(points) - 2)
    t = place - at
    (x0, y0), (x1, y1) = points[at], points[at + 1]
    # Of the Bézier curve of ``_path``: its inner points stand upright over both ends.
    bend = 3 * t * t - 2 * t * t * t
    y = y0 * (1 - t) ** 3 + 3 * (y0 + y1) / 2 * t * (1 - t) + y1 * t**3
    return x0 + (x1 - x0) * bend, y


def _loop(centre: Point, width: float) -> tuple[str, Point]:
    x, y = centre[0] + NODE_WIDTH / 2, centre[1]
    far = x + 44
    path = (
        f"M{x:.1f} {y - 11:.1f}C{far:.1f} {y - 34:.1f} {far:.1f} {y + 34:.1f} {x:.1f} {y + 11:.1f}"
    )
    return path, (x + 36 + width / 2, y)


def _short(text: str) -> str:
    return text if len(text) <= _NAME_CHARS else text[: _NAME_CHARS - 1] + "…"


def _px(value: float) -> str:
    return f"{value:.1f}"
