"""What the site needs beside its pages: notebooks with output, and nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from griffe import Class, Decorator, Expr, ExprName, Extension, Module
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

from zarr_manifests.cli import app

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MATHJAX = re.compile(r"<script data-mkdocs-jupyter-mathjax.*?</script>", re.DOTALL)
PICTURE = 'src="data:image/png;base64,'
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc\s*=\s*["']?(?:https?:)?//[^\s"'>]*"""
    r"""|<link\b(?=[^>]*\brel\s*=\s*["']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref\s*=\s*["']?(?:https?:)?//[^\s"'>]*"""
    r"""|(?:@import\s+|\burl\()["']?(?:https?:)?//[^\s"')]*""",
    re.IGNORECASE,
)
STRUCTS = (
    "msgspec.Struct",
    "zarr_manifests.config.sections.Section",
)
DATACLASS = ExprName("dataclasses.dataclass")


class Structs(Extension):
    """Show structs as dataclasses, whose signatures the site knows how to make."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        due: list[Module | Class] = [pkg]
        while due:
            scope = due.pop()
            due += [inner for inner in scope.members.values() if isinstance(inner, Module | Class)]
            bases = [base for base in getattr(scope, "bases", ()) if isinstance(base, Expr)]
            if isinstance(scope, Class) and any(b.canonical_path in STRUCTS for b in bases):
                scope.decorators.append(Decorator(DATACLASS, lineno=None, endlineno=None))


# Notebooks are run in a copy: they write beside themselves.
_running = TemporaryDirectory()


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config: Any) -> Files:
    """The pages, with the notebooks beside them."""
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        copy = shutil.copy(notebook, _running.name)
        files.append(File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(copy)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page whose links to notebooks lead to their pages on the site, with what is generated."""
    if page.file.src_uri == "reference/command-line.md":
        markdown += "\n" + verbs()
    return markdown.replace("](../notebooks/", "](notebooks/")


def verbs() -> str:
    """The verbs of the command line with their arguments and options, as Markdown."""
    command = get_command(app)
    name = "zarr-manifests"
    context = Context(command, info_name=name)
    return get_docs_for_click(obj=command, ctx=context, indent=1, name=name)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """A page without the script that fetches MathJax for notebooks: ours have no formulas.

    Raises
    ------
    PluginError
        If a notebook has made no picture.
    """
    if page.file.src_uri.startswith("notebooks/") and PICTURE not in output:
        raise PluginError(f"{page.file.src_uri} has no picture")
    return MATHJAX.sub("", output)


def on_post_build(config: Any) -> None:
    """Raise if viewing the site would fetch anything from elsewhere."""
    site = Path(config.site_dir)
    fetched = [
        f"{page.relative_to(site)}: {found[0]}"
        for page in sorted(site.rglob("*"))
        if page.suffix in {".html", ".css"}
        for found in FETCHED.finditer(page.read_text(encoding="utf-8"))
    ]
    if fetched:
        raise PluginError("The site fetches from elsewhere:\n" + "\n".join(fetched))
