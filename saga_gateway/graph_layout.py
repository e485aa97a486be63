"""Where the nodes and edges of a directed graph are drawn: layers from top to bottom.

Edges that close a cycle are turned for the layering; long edges get a bend in every layer that they
cross; the order in a layer is that of the neighbours' mean place, swept down and up. The same graph
gives the same drawing. Lengths are pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

NODE_WIDTH = 168.0
NODE_HEIGHT = 46.0
LAYER_HEIGHT = 124.0
MARGIN = 24.0
LOOP_WIDTH = 190.0

_GAP = 36.0
_BEND_WIDTH = 96.0
_SWEEPS = 12
_PORT_SPAN = 0.6

Point = tuple[float, float]


@dataclass(slots=True)
class Layout:
    """A drawing.

    Attributes:
        centres: of the nodes.
        routes: the points of each edge but for loops, from its source to its target.
        width, height: of the whole.
    """

    centres: dict[str, Point] = field(default_factory=dict)
    routes: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


@dataclass(slots=True)
class _Place:
    """A node or a bend in a layer; ``x``: its middle. Neighbours stand with their edge's number."""

    width: float
    x: float = 0.0
    above: list[tuple[str, int]] = field(default_factory=list)
    below: list[tuple[str, int]] = field(default_factory=list)


def lay_out(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> Layout:
    """Place the nodes; those that come first stand higher where edges leave it open.

    Args:
        nodes: unique ids.
        edges: pairs of these, each once; one from a node to itself is a loop.
    """
    wanted = [(a, b) for a, b in edges if a != b]
    loops = {a for a, b in edges if a == b}
    turned = _closing(nodes, wanted)
    down = [(b, a) if (a, b) in turned else (a, b) for a, b in wanted]
    layer_of = _layers(nodes, down)
    places = {name: _Place(NODE_WIDTH + (LOOP_WIDTH if name in loops else 0)) for name in nodes}
    layers: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for name in nodes:
        layers[layer_of[name]].append(name)
    chains: dict[tuple[str, str], list[str]] = {}
    for at, (edge, (upper, lower)) in enumerate(zip(wanted, down, strict=True)):
        chain = [upper]
        for layer in range(layer_of[upper] + 1, layer_of[lower]):
            bend = f"\0{at}.{layer}"
            places[bend] = _Place(_BEND_WIDTH)
            layers[layer].append(bend)
            chain.append(bend)
        chain.append(lower)
        for above, below in pairwise(chain):
            places[above].below.append((below, at))
            places[below].above.append((above, at))
        chains[edge] = chain
    _order(layers, places)
    _spread(layers, places)
    return _drawn(nodes, loops, layers, places, chains, turned)


def _closing(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges that close a cycle, as a walk in depth from the first nodes on finds them."""
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for a, b in edges:
        after[a].append(b)
    closing: set[tuple[str, str]] = set()
    done: set[str] = set()
    for root in nodes:
        if root in done:
            continue
        path, pending = {root}, [(root, iter(after[root]))]
        while pending:
            name, following = pending[-1]
            for to in following:
                if to in path:
                    closing.add((name, to))
                elif to not in done:
                    path.add(to)
                    pending.append((to, iter(after[to])))
                    break
            else:
                pending.pop()
                path.discard(name)
                done.add(name)
    return closing


def _layers(nodes: Sequence[str], down: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The longest path to each node, of a graph without cycles."""
    before: dict[str, list[str]] = {name: [] for name in nodes}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for a, b in down:
        before[b].append(a)
        after[a].append(b)
    missing = {name: len(before[name]) for name in nodes}
    ready = [name for name in nodes if not missing[name]]
    layer_of: dict[str, int] = {}
    while ready:
        name = ready.pop()
        layer_of[name] = max((layer_of[each] + 1 for each in before[name]), default=0)
        for to in after[name]:
            missing[to] -= 1
            if not missing[to]:
                ready.append(to)
    return layer_of


def _order(layers: list[list[str]], places: Mapping[str, _Place]) -> None:
    """Sort each layer by where its neighbours stand, to have few crossings."""
    rank: dict[str, float] = {}
    for layer in layers:
        rank |= {name: float(at) for at, name in enumerate(layer)}
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            means = {}
            for name in layer:
                near = places[name].above if is_down else places[name].below
                ranks = [rank[each] for each, _ in near]
                means[name] = sum(ranks) / len(ranks) if ranks else rank[name]
            layer.sort(key=lambda name: (means[name], rank[name]))
            rank |= {name: float(at) for at, name in enumerate(layer)}


def _spread(layers: list[list[str]], places: Mapping[str, _Place]) -> None:
    """Move each node near the mean of its neighbours, without overlaps."""
    for layer in layers:
        _separate(layer, places)
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            for name in layer:
                place = places[name]
                near = place.above if is_down else place.below
                if near:
                    place.x = sum(places[each].x for each, _ in near) / len(near)
            _separate(layer, places)


def _separate(layer: Sequence[str], places: Mapping[str, _Place]) -> None:
    """Push apart what overlaps, in the order of the layer, and keep the layer's mean."""
    if not layer:
        return
    mean = sum(places[name].x for name in layer) / len(layer)
    for left, right in pairwise(layer):
        needed = (places[left].width + places[right].width) / 2 + _GAP
        places[right].x = max(places[right].x, places[left].x + needed)
    shift = mean - sum(places[name].x for name in layer) / len(layer)
    for name in layer:
        places[name].x += shift


def _drawn(
    nodes: Sequence[str],
    loops: set[str],
    layers: list[list[str]],
    places: Mapping[str, _Place],
    chains: Mapping[tuple[str, str], list[str]],
    turned: set[tuple[str, str]],
) -> Layout:
    if not nodes:
        return Layout()
    left = min(place.x - place.width / 2 for place in places.values()) - MARGIN
    right = max(place.x + place.width / 2 for place in places.values()) + MARGIN
    y_of = {
        name: MARGIN + NODE_HEIGHT / 2 + at * LAYER_HEIGHT
        for at, layer in enumerate(layers)
        for name in layer
    }
    # Of a node with a loop the loop stands at its right, within its width.
    centres = {
        name: (places[name].x - left - (LOOP_WIDTH / 2 if name in loops else 0), y_of[name])
        for name in nodes
    }
    routes: dict[tuple[str, str], list[Point]] = {}
    for at, (edge, chain) in enumerate(chains.items()):
        upper, lower = chain[0], chain[-1]
        points = [_port(centres[upper], places, places[upper].below, (chain[1], at))]
        points += [(places[bend].x - left, y_of[bend]) for bend in chain[1:-1]]
        points.append(_port(centres[lower], places, places[lower].above, (chain[-2], at), up=True))
        routes[edge] = points[::-1] if edge in turned else points
    height = 2 * MARGIN + NODE_HEIGHT + (len(layers) - 1) * LAYER_HEIGHT
    return Layout(centres, routes, right - left, height)


def _port(
    centre: Point,
    places: Mapping[str, _Place],
    near: Sequence[tuple[str, int]],
    to: tuple[str, int],
    *,
    up: bool = False,
) -> Point:
    """Where an edge meets its node: side by side with the others, in the order of where they go."""
    at = sorted(near, key=lambda each: (places[each[0]].x, each[1])).index(to)
    span = NODE_WIDTH * _PORT_SPAN
    x = centre[0] - span / 2 + span * (at + 1) / (len(near) + 1)
    return x, centre[1] + (-NODE_HEIGHT / 2 if up else NODE_HEIGHT / 2)
