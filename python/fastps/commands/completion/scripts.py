"""The scripts that complete ``fastps`` and ``fastps-server``, for each shell.

A script finds the command that the words before the cursor name, then offers what may follow. After an option
that needs a value and has no choices it offers files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from fastps.commands.completion.tree import Command, Option

__all__ = ["SCRIPTS"]

_BASH = """\
# bash completion of fastps. Use it with: source <(fastps completion bash)
_fastps() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} place=fastps offers= k
    [[ ${{COMP_WORDS[0]##*/}} == fastps-server ]] && place="fastps serve"
    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $current == = ]] && before=${{COMP_WORDS[COMP_CWORD-1]}} current=
    for ((k = 1; k < COMP_CWORD; k++)); do
        case "$place ${{COMP_WORDS[k]}}" in
            {places}) place="$place ${{COMP_WORDS[k]}}" ;;
        esac
    done
    case "$place $before" in
{values}
        *) case "$place" in
{offers}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$offers" -- "$current"))
}}
complete -o bashdefault -o default -F _fastps fastps fastps-server
"""

_ZSH = """\
# zsh completion of fastps. Use it with: source <(fastps completion zsh), after compinit.
_fastps() {{
    local place=fastps word
    local -a offers
    [[ ${{words[1]:t}} == fastps-server ]] && place="fastps serve"
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$place $word" in
            {places}) place="$place $word" ;;
        esac
    done
    case "$place ${{words[CURRENT-1]}}" in
{values}
        *) case "$place" in
{offers}
        esac ;;
    esac
    (( $#offers )) && _describe fastps offers || _files
}}
compdef _fastps fastps fastps-server
"""

_FISH = """\
# fish completion of fastps. Use it with: fastps completion fish | source
function __fastps_at
    set -l words (commandline -opc)
    set -l place fastps
    string match -q '*fastps-server' -- $words[1]; and set place 'fastps serve'
    for word in $words[2..]
        contains -- "$place $word" {places}; and set place "$place $word"
    end
    test "$place" = "$argv"
end
{lines}
"""


def _bash(commands: list[Command]) -> str:
    offers = []
    for command in commands:
        names = [name for option in command.options for name in option.names]
        offers.append(f'            "{command.name}") offers="{" ".join([*command.words, *names])}" ;;')
    return _BASH.format(
        places=_patterns(command.name for command in commands[1:]),
        values=_values(commands, "offers='{}' ;;"),
        offers="\n".join(offers),
    )


def _zsh(commands: list[Command]) -> str:
    offers = []
    for command in commands:
        described = [*command.words.items()]
        described += [(name, option.help) for option in command.options for name in option.names]
        listed = " ".join(shlex.quote(f"{word}:{text}".rstrip(":")) for word, text in described)
        offers.append(f'            "{command.name}") offers=({listed}) ;;')
    return _ZSH.format(
        places=_patterns(command.name for command in commands[1:]),
        values=_values(commands, "offers=({}) ;;"),
        offers="\n".join(offers),
    )


def _values(commands: list[Command], offer: str) -> str:
    """Cases of the options that take a value, by their choices."""
    places: dict[tuple[str, ...], list[str]] = {}
    for command in commands:
        for option in command.options:
            if option.needs_value:
                places.setdefault(option.choices, []).extend(
                    f"{command.name} {name}" for name in option.names
                )
    cases = [f"{_patterns(names)}) {offer.format(' '.join(choices))}" for choices, names in places.items()]
    return "\n".join(f"        {case}" for case in cases)


def _patterns(names: Iterable[str]) -> str:
    """One of these names, as a pattern of ``case``."""
    return "|".join(f'"{name}"' for name in names)


def _fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        for program in ("fastps", "fastps-server") if command.name == "fastps serve" else ("fastps",):
            start = f"complete -c {program} -n {_fish_quoted(f'__fastps_at {command.name}')}"
            lines += [f"{start} -f -a {word} -d {_fish_quoted(text)}" for word, text in command.words.items()]
            lines += [f"{start} {_fish_option(option)}" for option in command.options]
    places = " ".join(_fish_quoted(command.name) for command in commands[1:])
    return _FISH.format(places=places, lines="\n".join(lines))


def _fish_option(option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.choices:
        names.append(f"-x -a {_fish_quoted(' '.join(option.choices))}")
    elif option.needs_value:
        names.append("-r")
    return f"{' '.join(names)} -d {_fish_quoted(option.help)}"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
