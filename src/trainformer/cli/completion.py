"""`trainformer completion SHELL`: a script by which a shell completes commands, actions, options and their values.

Made of the parsers of all commands by shtab. Of `train` and `check`, whose options depend on the task, those are
completed that every training has, and the names of the tasks.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
# How an argument is called that takes one.
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
Make it again after an update. The folder of the file has to be there."""

# Bash makes three words of `--task=CausalLM`; what shtab writes expects `--task CausalLM`.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _INSTALL
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """What the shell is to source."""
    import shtab

    from trainformer.cli import frame

    parser = frame.complete_parser()
    _mark_paths(parser, shtab)
    return shtab.complete(parser, shell) + (_BASH if shell == "bash" else "")


def _mark_paths(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Complete names of files and folders where they are wanted."""
    from trainformer.cli import frame

    for action in parser._actions:
        if action.choices is None and action.nargs != 0:
            named = {action.metavar, action.dest.upper()}
            if named & _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif named & _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    for nested in frame.actions_of(parser).values():
        _mark_paths(nested, shtab)
