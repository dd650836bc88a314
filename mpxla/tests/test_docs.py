"""The pages of the documentation: all are in the menu, links lead somewhere, tables are true."""

import ast
import re
from pathlib import Path

import pytest

import mpxla as smp
from mpxla.cli.keys import table_of_keys
from mpxla.cli.main import main

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def menu():
    """Pages that the menu of the site names."""
    nav = (REPOSITORY / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)


def anchors(page):
    """Targets of links to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_menu_once():
    assert sorted(menu()) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub(r"^(```.*?^```|    .*?)$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), target
        assert page.parent != DOCS or file.parent in (DOCS, DOCS / "pictures"), target


def test_pages_have_one_title():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def test_all_configuration_keys_are_in_the_table(capsys):
    lines = table_of_keys()
    page = (DOCS / "configuration.md").read_text()
    assert "\n".join(["", *lines, ""]) in page, "python -m mpxla keys prints the table"
    assert main(["keys"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_reference_has_every_public_name():
    text = (DOCS / "reference.md").read_text()
    blocks = re.findall(r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\]\n)?", text, re.M)
    shown = set()
    for module, members in blocks:
        found = __import__(module, fromlist=["x"])
        names = members.split(", ") if members else found.__all__
        assert all(hasattr(found, name) for name in names), module
        shown |= set(names)
    constants = {"WORLD", "__version__"} | {n for n in smp.__all__ if n.endswith("_GROUP")}
    assert set(smp.__all__) - constants == shown & set(smp.__all__)


def texts_of_the_library():
    """All texts in the package; what a format string fills in is a line break."""
    found = []
    for path in (REPOSITORY / "mpxla").rglob("*.py"):
        if "tests" not in path.relative_to(REPOSITORY).parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "\n") for part in node.values]
                    found.append("".join(part if isinstance(part, str) else "\n" for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.ClassDef):
                    found.append(node.name)
    return "\0".join(found)


def test_troubleshooting_quotes_what_errors_say():
    page = (DOCS / "troubleshooting.md").read_text()
    texts = texts_of_the_library()
    tables = re.findall(r"^\| the text says .*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    quotes = [
        quote
        for table in tables
        for row in table.splitlines()
        for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    assert len(quotes) >= 15
    for quote in quotes:
        assert quote in texts, quote
