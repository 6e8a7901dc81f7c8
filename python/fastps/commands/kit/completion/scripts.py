"""The scripts that complete the commands of a program, for each shell.

A script finds the command that the words before the cursor name, then offers what may follow. After an option
that needs a value and has no choices it offers files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from fastps.commands.kit.completion.tree import Command, Option

__all__ = ["SCRIPTS"]

#: Programs that are a command of another one.
_ALIASES = {"fastps serve": "fastps-server"}

_BASH = """\
# bash completion of {program}. Use it with: source <({program} completion bash)
{function}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} place={program} offers= k
{aliases}    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
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
complete -o bashdefault -o default -F {function} {programs}
"""

_ZSH = """\
# zsh completion of {program}. Use it with: source <({program} completion zsh), after compinit.
{function}() {{
    local place={program} word
    local -a offers
{aliases}    for word in "${{(@)words[2,CURRENT-1]}}"; do
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
    (( $#offers )) && _describe {program} offers || _files
}}
compdef {function} {programs}
"""

_FISH = """\
# fish completion of {program}. Use it with: {program} completion fish | source
function _{function}_at
    set -l words (commandline -opc)
    set -l place {program}
{aliases}    for word in $words[2..]
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
        **_names(commands, '    [[ ${{COMP_WORDS[0]##*/}} == {} ]] && place="{}"\n'),
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
        **_names(commands, '    [[ ${{words[1]:t}} == {} ]] && place="{}"\n'),
        places=_patterns(command.name for command in commands[1:]),
        values=_values(commands, "offers=({}) ;;"),
        offers="\n".join(offers),
    )


def _names(commands: list[Command], alias: str) -> dict[str, str]:
    """The program, its function, the programs that are one of its commands, and a line for each of these."""
    program = commands[0].name
    aliases = {name: _ALIASES[name] for name in (command.name for command in commands) if name in _ALIASES}
    return {
        "program": program,
        "function": f"_{program.replace('-', '_')}",
        "programs": " ".join([program, *aliases.values()]),
        "aliases": "".join(alias.format(other, name) for name, other in aliases.items()),
    }


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
    names = _names(commands, "    string match -q '*{}' -- $words[1]; and set place '{}'\n")
    lines = []
    for command in commands:
        alias = _ALIASES.get(command.name)
        for program in (names["program"], alias) if alias else (names["program"],):
            place = _fish_quoted(f"_{names['function']}_at {command.name}")
            start = f"complete -c {program} -n {place}"
            lines += [f"{start} -f -a {word} -d {_fish_quoted(text)}" for word, text in command.words.items()]
            lines += [f"{start} {_fish_option(option)}" for option in command.options]
    places = " ".join(_fish_quoted(command.name) for command in commands[1:])
    return _FISH.format(**names, places=places, lines="\n".join(lines))


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
