"""The files of the page, and one HTML file with all of them inside, which works from a folder and offline.

Only the standard library is imported: the documentation is built without the extension module.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import posixpath
import re
from pathlib import Path

__all__ = ["KINDS", "one_file", "page_files"]

PAGE = Path(__file__).parent / "page"
#: Types of the files, by the ends of their names.
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}

#: The only forms of import and export that the page uses, so that its modules can be joined.
IMPORT = re.compile(r'^import (\{[^}]*\}) from "(\.[\w./-]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)


def page_files() -> dict[str, bytes]:
    """The files of the page, by their paths in its folder."""
    paths = sorted(path for path in PAGE.rglob("*") if path.suffix in KINDS)
    return {path.relative_to(PAGE).as_posix(): path.read_bytes() for path in paths}


def one_file() -> str:
    """The page as one file."""
    files = page_files()
    page = files["index.html"].decode()
    style = "\n".join(files[name].decode() for name in re.findall(r'rel="stylesheet" href="([^"]+)"', page))
    style = re.sub(r'url\("([^"]+\.woff2)"\)', lambda found: _font(files[found[1]]), style)
    library = files["vendor/uPlot.iife.min.js"].decode()
    wasm = base64.b64encode(gzip.compress(files["fastps.wasm"], mtime=0)).decode()
    main, work = _joined(files, "main.js"), _joined(files, "work.js")
    pictures = {name: files[name] for name in files if name.startswith("lessons/")}
    parts = [
        *(_picture(name, image) for name, image in pictures.items()),
        f'<script type="application/gzip" id="wasm">{wasm}</script>',
        f'<script type="text/plain" id="work">{_script(work)}</script>',
    ]
    scripts = [_script(library), _script(main)]
    page = re.sub(r'src="(others/[^"]+)"', lambda found: f'src="{_image(files[found[1]])}"', page)
    body = re.sub(r'\s*<(?:link rel="stylesheet"|script)[^>]*>(?:</script>)?', "", page)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))} 'wasm-unsafe-eval'; "
        f"style-src {_hash(style)}; img-src data:; font-src data:; worker-src blob:; base-uri 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    tail = "\n".join(
        [*parts, f"<script>{scripts[0]}</script>", f'<script type="module">{scripts[1]}</script>']
    )
    # The policy comes before everything that it governs.
    body = body.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)
    return body.replace("</body>", f"{tail}\n</body>", 1)


def _picture(name: str, image: bytes) -> str:
    """A picture as the text that an `img` shows."""
    lesson = posixpath.basename(name).removesuffix(".png")
    return f'<script type="text/plain" id="picture-{lesson}">{_image(image)}</script>'


def _image(body: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(body).decode()}"


def _font(body: bytes) -> str:
    """A font as the address that a style sheet names."""
    return f'url("data:font/woff2;base64,{base64.b64encode(body).decode()}")'


def _joined(files: dict[str, bytes], first: str) -> str:
    """A module and all that it imports as one script: each becomes a function that returns its exports."""
    order: dict[str, int] = {}
    scripts: list[str] = []

    def add(name: str) -> int:
        if name in order:
            return order[name]
        source = files[name].decode()
        below = {path: add(_path(name, path)) for _, path in IMPORT.findall(source)}
        source = IMPORT.sub(lambda found: f"const {found[1]} = module{below[found[2]]};", source)
        exported = ", ".join(EXPORT.findall(source))
        order[name] = len(order)
        body = f"{EXPORT.sub('', source)}\nreturn {{ {exported} }};"
        scripts.append(f"const module{order[name]} = (() => {{\n{body}\n}})();")
        return order[name]

    add(first)
    return "\n".join(scripts)


def _path(name: str, other: str) -> str:
    """The path that a module means when it imports another one."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), other))


def _script(source: str) -> str:
    """A script that HTML does not end early."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
