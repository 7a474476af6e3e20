"""`trainformer completion SHELL`: print a script with which a shell completes commands, actions, options and values.

shtab generates it from the parsers of all commands. For `train` and `check`, whose options depend on the task, it
completes the options of the trainer and the names of tasks and adapters.
"""

from __future__ import annotations

import argparse
from typing import Any

from trainformer.cli import app

SHELLS = ("bash", "zsh", "tcsh")
# Metavars of arguments that take a folder or a file.
_FOLDERS = {"RUN", "FOLDER", "RUN_DIR"}
_FILES = {"PATH", "DATA", "VAL_DATA", "CONFIG", "OUT", "FILE", "A", "B", "SCRIPT", "..."}
_INSTALL = """\
to install it:
  bash  trainformer completion bash > ~/.local/share/bash-completion/completions/trainformer
        (without the package bash-completion: source that file in ~/.bashrc)
  zsh   trainformer completion zsh > ~/.zfunc/_trainformer
        (with these lines in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit && compinit)
  tcsh  trainformer completion tcsh > ~/.trainformer.completion.csh
        (with this line in ~/.tcshrc: source ~/.trainformer.completion.csh)
Repeat it after an update. The folder must exist."""

# Bash splits `--task=CausalLM` into three words; the script of shtab expects `--task CausalLM`.
_BASH = """
_trainformer() {
  local -a words=()
  local i place=0
  for ((i = 0; i < ${#COMP_WORDS[@]}; i++)); do
    if [[ "${COMP_WORDS[i]}" != "=" ]]; then
      words+=("${COMP_WORDS[i]}")
    elif ((i == COMP_CWORD)); then
      words+=("")
    fi
    ((i == COMP_CWORD)) && place=$((${#words[@]} - 1))
  done
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$place
  _shtab_trainformer "$@"
}

complete -o bashdefault -F _trainformer trainformer"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _INSTALL
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def _run(args: argparse.Namespace) -> None:
    print(script(args.shell))


def script(shell: str) -> str:
    """The completion script."""
    import shtab

    parser = app.complete_parser()
    _mark_paths(parser, shtab)
    return shtab.complete(parser, shell) + (_BASH if shell == "bash" else "")


def _mark_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Complete the names of files and folders."""
    for action in parser._actions:
        if action.choices is None and action.nargs != 0:
            named = {action.metavar, action.dest.upper()}
            if named & _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif named & _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    for nested in app.actions_of(parser).values():
        _mark_paths(nested, shtab)


COMMANDS = {"completion": app.Command(_add_arguments, _run)}
