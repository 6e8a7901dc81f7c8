"""Prose reads as plain English, and comments fit the screen.

Each check compares a count with a recorded number that may only fall. The goal is 0: when you bring a count
down, lower its number.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Most occurrences of stilted words, and most comment lines above 110 columns.
STILTED = 0
TOO_WIDE = 0
# Most stilted phrases per 1,000 lines of a tree.
PHRASES_PER_1000_LINES = {"rust": 0.5, "python": 0.6, "tests": 0.6, "benchmarks": 0.8, "examples": 0.0}

COLUMNS = 110
# Words that names avoid: they say that something happened instead of naming the value.
NAMES = re.compile(r"(?:^|_)(?:told|anew|mends?|mended|goes_on|so_many)(?:_|$)", re.IGNORECASE)
WORDS = re.compile(r"\b(?:anew|whoever|in\s+vain|is\s+told|nobody)\b", re.IGNORECASE)

# Phrases that describe a value where a noun would name it, or that read as translated, each with an example.
# A few have a good use ("the memory in which the value lies"), so the aim is a low density and not 0.
_VERBS = "is|was|has|came|makes|follows|became|belongs|ends|goes|changes|stays|waits|must|may|cannot|can"
_SUBJECTS = "of|a|the|an|its|each|it|one|all|no|others?|only|this|some"
PHRASES = {
    rf"(?:^|[.:;] )What (?:{_VERBS}|{_SUBJECTS})\b": "What is left of the range",
    r"^Whether\b": "Whether it waits",
    r"(?:^|[.:;] )Who\b": "Who sends the frame",
    r"\b\w+ alone\b": "by drop alone",
    r"\btold\b|\btells? (?:of|it)\b": "the answer tells of a slice",
    r"\bmend(?:s|ed|ing)?\b": "mends the file",
    r"\b(?:what|that|who) is no\b": "what is no mapping",
    r"\b(?:by|of) (?:itself|its own|their own|his own|one's own)\b": "a thread of its own",
    r"\b[Nn]one of\b": "none of them",
    r"\b[Ss]o (?:many|much|long|often)\b": "so many bytes",
    r"\bas (?:it|they) (?:is|are|was|were|came|lies?|comes?)\b": "the bytes as they are",
    r"\bgo(?:es)? on\b": "pushes go on",
    r"\bis at it\b": "a thread is at it",
    r"\bgiv(?:e|es|en) back\b": "memory is given back",
    r"\b(?:is|are) there\b": "all answers are there",
    r"\bone after the other\b": "all slots, one after the other",
    r"\bstands?\b": "the name stands for all addresses",
    r"\blies?\b": "the slice lies on shard 0",
    r"\bonly then\b": "only then the lock is free",
    r"\bholds? on to\b": "holds on to the buffer",
    r"\b[Tt]he same (?:of|for|with)\b": "the same of rows",
    r"\bbut for\b": "all but for the last",
    r"\bfor good\b": "infinite for good",
    r"\b(?:became|becomes?) of\b": "what became of the push",
}

# A comment, or a string literal, plain or raw; characters are matched so that '"' opens no string.
RUST = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|'(?:\\[^\n]|[^'\\\n])'""",
    re.DOTALL,
)


def sources(folder: str, ending: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob(f"*{ending}"))
    return [path for path in found if not {"generated", "target", "__pycache__"} & set(path.parts)]


def rust_prose(source: str) -> str:
    """Comments and strings, one after the other; the lines of one comment are joined."""
    parts = [match[0] for match in RUST.finditer(source)]
    return "\n".join(re.sub(r"^(?://[/!]?|/\*)\s?", "", part) for part in parts)


def python_prose(source: str) -> str:
    # From Python 3.12 on, an f-string is several tokens.
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    parts = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            text = token.string.lstrip("# ")
            parts.append(re.sub(r"\{[^{}]*\}", "", text) if text.lower().startswith(("f", "rf")) else text)
    return "\n".join(parts)


def proto_prose(source: str) -> str:
    return "\n".join(re.findall(r"//\s?(.*)", source))


def prose() -> Iterator[tuple[Path, str]]:
    """Every file that is read for its words, and these."""
    for tree in ("rust", "python"):
        yield from prose_of_code(tree)
    for path in sources("protos", ".proto"):
        yield path, proto_prose(path.read_text())
    pages = [path for folder in ("rust", "python", "protos", "docs") for path in sources(folder, ".md")]
    for path in [ROOT / "README.md", *pages]:
        yield path, path.read_text()


def prose_of_code(tree: str) -> Iterator[tuple[Path, str]]:
    """The files of code in a tree, and these, except this one, which names the words."""
    for path in sources(tree, ".rs"):
        yield path, rust_prose(path.read_text())
    for path in [*sources(tree, ".py"), *sources(tree, ".pyi")]:
        if path != Path(__file__).resolve():
            yield path, python_prose(path.read_text())


def wide_comments() -> Iterator[str]:
    """Lines of comments and of docstrings that are too wide."""
    for path in sources("rust", ".rs"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith("//") and len(line) > COLUMNS:
                yield f"{path.relative_to(ROOT)}:{number}"
    for path in [*sources("python", ".py"), *sources("python", ".pyi")]:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) and not token.line[: token.start[1]].strip():
                for k, line in enumerate(token.line.splitlines()):
                    if len(line) > COLUMNS:
                        yield f"{path.relative_to(ROOT)}:{token.start[0] + k}"


def phrases(text: str) -> list[str]:
    """The lines with stilted phrases, each as often as it has one."""
    lines = [line.strip(" \"'") for line in text.splitlines()]
    return [line for line in lines for pattern in PHRASES for _ in re.finditer(pattern, line)]


def report(found: list[str], recorded: float) -> str:
    return f"{len(found)} where at most {recorded:.0f} are allowed:\n" + "\n".join(found)


def test_prose_has_no_stilted_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {' '.join(text[max(match.start() - 40, 0) : match.end() + 40].split())}"
        for path, text in prose()
        for match in WORDS.finditer(text)
    ]
    assert len(found) <= STILTED, report(found, STILTED)


def names(path: Path) -> set[str]:
    """The identifiers of a file."""
    source = path.read_text()
    if path.suffix == ".rs":
        return set(re.findall(r"[A-Za-z_]\w*", RUST.sub(" ", source)))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_names_are_plain() -> None:
    files = [
        *sources("rust", ".rs"),
        *(p for tree in ("python", "tests", "examples") for p in sources(tree, ".py")),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {name}" for path in files for name in names(path) if NAMES.search(name)
    ]
    assert not found, report(sorted(found), 0)


@pytest.mark.parametrize("tree", PHRASES_PER_1000_LINES)
def test_prose_has_few_stilted_phrases(tree: str) -> None:
    lines, found = 0, []
    for path, text in prose_of_code(tree):
        lines += len(path.read_text().splitlines())
        found += [f"{path.relative_to(ROOT)}: {line}" for line in phrases(text)]
    most = PHRASES_PER_1000_LINES[tree] * lines / 1000
    assert len(found) <= most, report(found, most)


def test_comments_have_at_most_110_columns() -> None:
    found = list(wide_comments())
    assert len(found) <= TOO_WIDE, report(found, TOO_WIDE)


def test_the_counters_see_comments_and_strings_and_no_code() -> None:
    rust = """let nobody = 1; // nobody\n/// is\n/// told\nf("anew", '"', whoever, r#"in vain"#);"""
    assert WORDS.findall(rust_prose(rust)) == ["nobody", "is\ntold", "anew", "in vain"]
    python = 'nobody = 1  # is\n# told\nx = f"whoever {nobody} anew"\n'
    assert sorted(WORDS.findall(python_prose(python))) == ["anew", "is\ntold", "whoever"]


def test_the_counter_sees_each_phrase_and_no_plain_text() -> None:
    for pattern, example in PHRASES.items():
        assert re.search(pattern, example), example
        assert phrases(rust_prose(f"let told = 1; // {example}")), example
        assert phrases(python_prose(f'told = 1\nx = """{example}"""\n')), example
    plain = """
        Outcome of the push. Returns whether the slice is sealed. Set when the worker waits.
        Bytes of a frame; what they mean, the header says. Asks who may write. All goals are met.
    """
    assert phrases(plain) == []
