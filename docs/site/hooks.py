"""Hooks of mkdocs: pages of the top folder, links to files outside `docs`, and a check of the site.

Links in pages are those of the repository. README, CONTRIBUTING and CHANGELOG become pages of the
site; any other file that a page links to is copied beside it as text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

TOP_PAGES = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages of the top folder, and their names on the site, where README would be a second index."""
COPIES = "files"
"""Folder of the site for copies of files that are no pages."""

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]+?src=[\"']?([^\"'\s>]+)|"
                     r"<link[^>]+?href=[\"']?([^\"'\s>]+)")  # fmt: skip
_BLOCK_OR_NAME = re.compile(
    r"<pre\b.*?</pre>|(?<=<code>)(?P<name>[^<>]{13,})(?=</code>)", re.DOTALL
)
_SEPARATOR = re.compile(r"(?<=\w)(?:::|[/._=-])(?=\w)")
_REMOTE = re.compile(r"^(?:https?:)?//")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the top folder, and copies of the files that pages link to."""
    root = Path(config.config_file_path).parent
    for name, page in TOP_PAGES.items():
        files.append(File.generated(config, page, content=(root / name).read_text()))
    outside: set[str] = set()
    for file in files.documentation_pages():
        for _, link, _ in _LINK.findall(file.content_string):
            target = _repository_path(file.src_uri, link)
            if target and (root / target).is_file():
                outside.add(target)
    for target in sorted(outside):
        files.append(File.generated(config, _copy(target), content=(root / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of `docs` at what `on_files` has added for them."""

    def replace(match: re.Match[str]) -> str:
        target = _repository_path(page.file.src_uri, match[2])
        if target is None:
            return match[0]
        if target == "docs" or target.startswith("docs/"):
            target = posixpath.relpath(target, "docs")
        else:
            target = TOP_PAGES.get(target) or _copy(target)
        relative = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{relative}{match[3]}"

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names break behind their separators: in a table they break nowhere else."""

    def breaks(found: re.Match[str]) -> str:
        return _SEPARATOR.sub(r"\g<0><wbr>", found[0]) if found["name"] else found[0]

    return _BLOCK_OR_NAME.sub(breaks, html)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads anything from elsewhere when it is looked at."""
    remote = [
        f"{os.path.relpath(path, config.site_dir)}: {address}"
        for path in Path(config.site_dir).rglob("*.html")
        for address in map("".join, _LOADED.findall(path.read_text()))
        if _REMOTE.match(address)
    ]
    if remote:
        raise PluginError("the site loads what is not in it:\n" + "\n".join(sorted(set(remote))))


def _repository_path(source: str, link: str) -> str | None:
    """Return the path from the top folder, for a link that leaves `docs` or comes from outside."""
    if "://" in link or link.startswith("mailto:"):
        return None
    from_top = source in TOP_PAGES.values()
    folder = "." if from_top else posixpath.join("docs", posixpath.dirname(source))
    target = posixpath.normpath(posixpath.join(folder, link))
    inside = target.startswith("docs/")
    return None if inside and not from_top else target


def _copy(target: str) -> str:
    return f"{COPIES}/{target}.txt"
