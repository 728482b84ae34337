"""The shape of the code that docs/code.md tells: which room imports which, and how long things get."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "swiftlite"
FILES = sorted(ROOT.rglob("*.py"))
# room -> rooms that it may import; any may import the modules beside the rooms
ARROWS = {
    "config": set(),
    "data": {"config"},
    "models": {"config"},
    "objectives": {"models"},
    "parallel": {"config", "models"},
    "checkpoint": {"config", "parallel"},
    "planning": {"config", "models", "parallel"},
    "reporting": {"config"},
    "serving": {"config", "data", "models", "checkpoint"},
    "training": {
        "config",
        "data",
        "models",
        "objectives",
        "parallel",
        "checkpoint",
        "planning",
        "reporting",
        "serving",
    },
    "verification": {"config", "models", "parallel", "checkpoint", "reporting", "training"},
}
# shelf of a room -> shelves of the same room that it may import ("" is what lies in the room itself)
SHELVES = {
    "config/others": {""},
    "config/settings": {""},
    "data/calls": {"rows", "tokens"},
    "data/rows": set(),
    "data/tokens": {"rows"},
    "models/attention": {""},
    "models/kernels": {""},
    "training/guards": {""},
    "training/optimizers": {""},
    "training/rollouts": {""},
}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


def room_of(file: Path) -> str | None:
    parts = file.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of swiftlite that run where this one does: all but those that only type checkers import."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swiftlite."):
        yield node.module
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_rooms_import_as_the_arrows_run():
    found = {}
    for file in FILES:
        if (room := room_of(file)) in ARROWS:
            rooms = {name.split(".")[1] for name in imported(ast.parse(file.read_text()))} & {*ARROWS, "cli"}
            found.setdefault(room, set()).update(rooms - {room})
    assert found == ARROWS


def test_shelves_import_as_they_lie():
    found = {}
    for file in FILES:
        shelf = file.parent.relative_to(ROOT)
        if len(shelf.parts) == 2:
            modules = [ROOT.joinpath(*name.split(".")[1:]) for name in imported(ast.parse(file.read_text()))]
            folders = {(path if path.is_dir() else path.parent).relative_to(ROOT) for path in modules}
            others = {"/".join(folder.parts[1:]) for folder in folders - {shelf} if folder.parts[:1] == shelf.parts[:1]}
            found.setdefault(str(shelf), set()).update(others)
    assert found == SHELVES


def test_files_and_functions_stay_short():
    for file in FILES:
        text = file.read_text()
        assert len(text.splitlines()) <= LINES_OF_A_FILE, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < LINES_OF_A_FUNCTION, f"{file}: {node.name}"


def test_the_page_on_data_has_every_reason_of_a_bad_row():
    calls = [node for file in FILES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    reasons = {call.args[0].value for call in calls if ast.unparse(call.func) == "BadRow"}
    page = (ROOT.parent / "docs" / "data.md").read_text()
    assert len(reasons) > 20 and not [reason for reason in reasons if f"`{reason}`" not in page]


def test_the_tour_names_every_room_and_files_that_are_there():
    tour = (ROOT.parent / "docs" / "code.md").read_text()
    for room in (*ARROWS, "cli"):
        assert f"`{room}/`" in tour
    for word in tour.split("`")[1::2]:
        if word.endswith(".py"):
            assert (ROOT / word).is_file() or (ROOT.parent / word).is_file(), word
