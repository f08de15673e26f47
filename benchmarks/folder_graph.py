"""Which folder of the package imports which, computed from the source, and the picture of it in the documentation.

Run `python benchmarks/folder_graph.py docs/architecture.png` to draw it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import diffusionbert

PACKAGE = Path(diffusionbert.__file__).parent
Graph = dict[str, set[str]]


def folder_graph(package: Path = PACKAGE) -> Graph:
    """The folders that each folder imports at run time; a file at the root counts as a folder of its own."""
    graph: Graph = {}
    for file in sorted(package.rglob("*.py")):
        node = _node(file.relative_to(package).parts)
        graph.setdefault(node, set()).update(_imported(file, package) - {node})
    return graph


def find_cycle(graph: Graph) -> list[str] | None:
    """Some folders that import each other in a circle, or None."""
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
    """Draws the folders in layers, each above what it imports, with the direct imports between them."""
    from matplotlib import pyplot as plt

    graph = {node: others for node, others in folder_graph().items() if node not in ("__init__", "__main__")}
    graph = {node: others & graph.keys() for node, others in graph.items()}
    if (cycle := find_cycle(graph)) is not None:
        raise SystemExit(f"folders import each other in a circle: {' -> '.join(cycle)}")
    layers: dict[str, int] = {}
    while len(layers) < len(graph):
        ready = [node for node in graph if node not in layers and graph[node] <= layers.keys()]
        layers |= {node: 1 + max((layers[other] for other in graph[node]), default=-1) for node in ready}
    by_layer: dict[int, list[str]] = {}
    for node in sorted(layers):
        by_layer.setdefault(layers[node], []).append(node)
    position = {
        node: (index - (len(nodes) - 1) / 2, layer)
        for layer, nodes in by_layer.items()
        for index, node in enumerate(nodes)
    }
    figure, axes = plt.subplots(figsize=(7, 0.75 * (1 + max(by_layer))))
    for node, others in reduced(graph).items():
        for other in others:
            style = {"arrowstyle": "-|>", "color": "0.55", "connectionstyle": "arc3,rad=0.08"}
            arrow = {**style, "shrinkA": 13, "shrinkB": 13}
            axes.annotate("", position[other], position[node], arrowprops=arrow)
    for node, (x, y) in position.items():
        is_file = (PACKAGE / f"{node}.py").exists()
        style = {"boxstyle": "round,pad=0.35", "fc": "white" if is_file else "#dbe9f6", "ec": "#2b5c8a"}
        axes.text(x, y, f"{node}.py" if is_file else f"{node}/", ha="center", va="center", fontsize=10, bbox=style)
    width = max(len(nodes) for nodes in by_layer.values())
    axes.set(xlim=(-width / 2, width / 2), ylim=(-0.6, max(by_layer) + 0.6))
    axes.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _node(parts: tuple[str, ...]) -> str:
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def _imported(file: Path, package: Path) -> set[str]:
    """The nodes that a file imports; what only type checkers import does not count."""
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
