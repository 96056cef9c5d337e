"""Imports go one way: no circles of modules or folders, late ones and names in strings included,
none to a folder above.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache

import pytest

from tests import REPOSITORY

#: From below to above; those on a line import nothing of each other unless ``MAY`` says so.
LAYERS = (
    ("answers", "exceptions", "ssh", "texts", "version"),
    ("client",),
    ("adapters",),
    ("base", "logconfig", "reasons"),
    ("metrics",),
    ("zk", "config"),
    ("cloud", "lease", "nodescan", "nodeutils", "process"),
    ("access", "status"),
    ("nodemanager",),
    ("driver",),
    ("launcher", "builder", "web"),
    ("stats", "webapp", "provider_manager", "lab"),
    ("cmd",),
)
#: Folder -> what it imports of its layer.
MAY: dict[str, set[str]] = {"nodeutils": {"nodescan"}, "zk": {"config"}}
#: Packages that are interfaces for outside code -> what they import from above, to connect it with
#: what is below. Nodepool's own code imports the modules of these packages, never the package
#: itself.
INTERFACES = {"nodepool.config": {"nodepool.driver.registry"}}
#: Modules that are named because another process runs them, or because import hooks skip them.
NAMED = {
    "nodepool.lab.dev.installation": {
        "nodepool.cmd.launcher",
        "nodepool.cmd.nodemanager",
        "nodepool.lab.zkserver",
    },
    "nodepool.lab.simulation.install": {"nodepool.lab.simulation"},
}
#: Folder -> imports between its subfolders that are part of a circle, as ``one -> other``. May only
#: become shorter.
FOLDER_CIRCLES: dict[str, set[str]] = {}


class _Names(ast.NodeVisitor):
    """Collects what a text imports: names in import statements, and strings that are names of
    modules.

    Names of loggers, and of programs that another process runs (``-m``), are no imports.
    """

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = modules
        self.imported: set[str] = set()
        self.strings: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                self.imported.add(whole if whole in self.modules else node.module)

    def visit_Import(self, node: ast.Import) -> None:
        self.imported.update(alias.name for alias in node.names)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            # An entry point is written as module:attribute.
            self.strings.add(node.value.partition(":")[0])

    def visit_Call(self, node: ast.Call) -> None:
        if not ast.unparse(node.func).endswith("getLogger"):
            self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        for before, element in zip([None, *node.elts], node.elts, strict=False):
            if not (isinstance(before, ast.Constant) and before.value == "-m"):
                self.visit(element)


def edges_of(name: str, text: str, modules: Collection[str]) -> set[str]:
    """Modules that the text imports, or names in order to import them."""
    names = _Names(modules)
    names.visit(ast.parse(text))
    return ((names.imported | (names.strings - NAMED.get(name, set()))) & set(modules)) - {
        name,
        "nodepool",
    }


@cache
def graph() -> dict[str, set[str]]:
    """Module -> modules that it imports, anywhere in its text."""
    root = REPOSITORY / "nodepool"
    files = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    return {name: edges_of(name, path.read_text(), files) for name, path in files.items()}


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Modules that can be reached from themselves: what is left when all others are taken away
    from below and above.
    """
    left = {name: set(found) for name, found in edges.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        gone = {name for name, found in left.items() if not found or name not in used}
        if not gone:
            return sorted(left)
        left = {name: found - gone for name, found in left.items() if name not in gone}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "import nodepool.b",
        "from nodepool import b",
        "from nodepool.b import thing",
        "def late():\n    import nodepool.b",
        "if TYPE_CHECKING:\n    from nodepool.b import thing",
        "importlib.import_module('nodepool.b')",
        "LATE = {'thing': 'nodepool.b'}",
        "BACKENDS = {'thing': 'nodepool.b:Thing'}",
    ],
)
def test_edges_are_found(text: str) -> None:
    assert edges_of("nodepool.a", text, ["nodepool", "nodepool.a", "nodepool.b"]) == {"nodepool.b"}


@pytest.mark.parametrize(
    "text",
    ["logging.getLogger('nodepool.b')", "[sys.executable, '-m', 'nodepool.b']", "'see nodepool.b'"],
)
def test_loggers_and_programs_are_no_edges(text: str) -> None:
    assert edges_of("nodepool.a", text, ["nodepool", "nodepool.a", "nodepool.b"]) == set()


def test_named_modules_are_named() -> None:
    for name, found in NAMED.items():
        path = REPOSITORY / f"{name.replace('.', '/')}.py"
        names = _Names(graph())
        names.visit(ast.parse(path.read_text()))
        assert found <= names.strings, name


def test_imports_have_no_cycles() -> None:
    assert circles(graph()) == []


def test_interfaces_are_for_outside_code() -> None:
    users = [
        f"{name} imports {interface}"
        for interface in INTERFACES
        for name, found in graph().items()
        if interface in found
    ]
    assert users == []


def _upward() -> Iterator[tuple[str, str]]:
    level = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
    for name, found in graph().items():
        folder = name.split(".")[1] if "." in name else ""
        for other in found:
            target = other.split(".")[1] if "." in other else ""
            if not folder or not target or folder == target:
                continue
            if level[target] >= level[folder] and target not in MAY.get(folder, ()):
                yield name, other


def test_lower_layers_import_only_the_allowed_interfaces_of_higher_ones() -> None:
    allowed = {(name, other) for name, found in INTERFACES.items() for other in found}
    assert set(_upward()) == allowed


def test_adapters_import_only_the_client() -> None:
    for name, found in graph().items():
        if name.startswith("nodepool.adapters"):
            others = {other for other in found if not other.startswith("nodepool.adapters")}
            assert others - {"nodepool"} <= {
                "nodepool.answers",
                "nodepool.client",
                "nodepool.texts",
            }, name


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """What can be reached from a node in at least one step."""
    found: set[str] = set()
    left = list(edges.get(start, ()))
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(edges.get(node, ()))
    return found


def folder_circles(edges: dict[str, set[str]], folders: Collection[str]) -> dict[str, set[str]]:
    """Folder -> imports between its subfolders that are part of a circle.

    :param folders: all folders, as names of packages.
    """
    between: dict[str, dict[str, set[str]]] = {}
    for name, found in edges.items():
        for other in found:
            one, two = f"{name}.".split("."), f"{other}.".split(".")
            depth = next(
                number
                for number, pair in enumerate(zip(one, two, strict=False))
                if pair[0] != pair[1]
            )
            if depth > 1 and {".".join(one[: depth + 1]), ".".join(two[: depth + 1])} <= set(
                folders
            ):
                between.setdefault(".".join(one[:depth]), {}).setdefault(one[depth], set()).add(
                    two[depth]
                )
    circular: dict[str, set[str]] = {}
    for parent, inner in between.items():
        for one, targets in inner.items():
            for two in targets:
                if one in _reachable(two, inner):
                    circular.setdefault(parent, set()).add(f"{one} -> {two}")
    return circular


def test_folder_circles_are_found() -> None:
    edges = {
        "nodepool.x.a.one": {"nodepool.x.b.one", "nodepool.x.root"},
        "nodepool.x.b.two": {"nodepool.x.c"},
        "nodepool.x.c": {"nodepool.x.a.two"},
        "nodepool.x.d.one": {"nodepool.x.a.one", "nodepool.y.e.one"},
        "nodepool.x.root": {"nodepool.x.d.one"},
        "nodepool.y.e.one": {"nodepool.x.d.two"},
    }
    folders = [f"nodepool.{name}" for name in ("x", "x.a", "x.b", "x.c", "x.d", "y", "y.e")]
    assert folder_circles(edges, folders) == {"nodepool.x": {"a -> b", "b -> c", "c -> a"}}


def test_imports_have_no_cycles_of_folders() -> None:
    """Two folders of one folder do not import each other, also not by way of others."""
    folders = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "nodepool").rglob("*.py")
    }
    assert folder_circles(graph(), folders) == FOLDER_CIRCLES
