"""Computes which folder of the package imports which from the source, and draws the graph for the documentation.

Run `python benchmarks/folder_graph.py docs/architecture.png` to draw it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import diffusionbert

PACKAGE = Path(diffusionbert.__file__).parent
Graph = dict[str, set[str]]
_EVERYWHERE = {"parallel", "registry", "reporting"}
_ENTRANCES = {"__init__", "__main__"}


def folder_graph(package: Path = PACKAGE) -> Graph:
    """The folders that each folder imports at run time; a file at the root counts as a folder of its own."""
    graph: Graph = {}
    for file in sorted(package.rglob("*.py")):
        node = _node(file.relative_to(package).parts)
        graph.setdefault(node, set()).update(_imported(file, package) - {node})
    return graph


def find_cycle(graph: Graph) -> list[str] | None:
    """Some folders that import each other in a cycle, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in sorted(graph.get(node, ())):
            if (found := visit(other, [*path, node])) is not None:
                return found
        done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, [])) is not None), None)


def reduced(graph: Graph) -> Graph:
    """The graph without edges that follow from others."""

    def reachable(node: str) -> set[str]:
        return set().union(*({other} | reachable(other) for other in graph.get(node, ())))

    return {
        node: {other for other in others if not any(other in reachable(between) for between in others - {other})}
        for node, others in graph.items()
    }


def draw(path: Path) -> None:
    """Draws the folders in layers, each above those it imports, without edges that follow from others."""
    from matplotlib import pyplot as plt

    complete = folder_graph()
    if (cycle := find_cycle(complete)) is not None:
        raise ValueError(f"the folders import each other in a circle: {' -> '.join(cycle)}")
    graph = {node: others - _EVERYWHERE for node, others in complete.items() if node not in _EVERYWHERE | _ENTRANCES}
    layers: dict[str, int] = {}
    while len(layers) < len(graph):
        ready = [node for node in graph if node not in layers and graph[node] <= layers.keys()]
        layers |= {node: 1 + max((layers[other] for other in graph[node]), default=-1) for node in ready}
    by_layer: dict[int, list[str]] = {}
    for node in sorted(layers):
        by_layer.setdefault(layers[node], []).append(node)
    position = {
        node: (2.0 * index - (len(nodes) - 1), 0.0 + layer)
        for layer, nodes in by_layer.items()
        for index, node in enumerate(nodes)
    }
    top = max(by_layer)
    figure, axes = plt.subplots(figsize=(6, 0.62 * (top + 2)))
    axes.set(xlim=(-2, 2), ylim=(-1.5, top + 0.4))
    axes.axis("off")
    boxes = {}
    for node, (x, y) in position.items():
        is_file = (PACKAGE / f"{node}.py").exists()
        style = {"boxstyle": "round,pad=0.35", "fc": "white" if is_file else "#dbe9f6", "ec": "#2b5c8a"}
        name = f"{node}.py" if is_file else f"{node}/"
        boxes[node] = axes.text(x, y, name, ha="center", va="center", fontsize=11, bbox=style)
    figure.canvas.draw()  # gives the boxes their sizes, which the arrows need
    for node, others in reduced(graph).items():
        for other in others:
            # An arrow that skips layers bends around the boxes between them.
            side = -1 if position[other][0] > 0 else position[other][0] < 0
            bend = 0.35 * side if layers[node] - layers[other] > 1 else 0.0
            arrow = {"arrowstyle": "-|>", "color": "0.45", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0}
            ends = {"patchA": boxes[node].get_bbox_patch(), "patchB": boxes[other].get_bbox_patch(), "shrinkB": 0}
            axes.annotate("", position[other], position[node], arrowprops={**arrow, **ends})
    *first, last = (f"{node}.py" for node in sorted(_EVERYWHERE))
    everywhere = f"{', '.join(first)} and {last}"
    axes.text(0, -1.1, f"An arrow means “imports”. Every folder may import\n{everywhere}.", ha="center", va="center")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _node(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def _imported(file: Path, package: Path) -> set[str]:
    """The nodes that a file imports, without imports for type checkers only."""
    found = set()
    for node in _run_time_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.name:
            parts = tuple(node.module.split(".")[1:])
            found |= {_node((*parts, "x"))} if parts else {_node((alias.name,)) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == package.name and len(parts) > 1}
    return {node for node in found if (package / node).is_dir() or (package / f"{node}.py").exists()}


def _run_time_nodes(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += [inner for statement in node.orelse for inner in (statement, *_run_time_nodes(statement))]
        else:
            nodes += [node, *_run_time_nodes(node)]
    return nodes


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
