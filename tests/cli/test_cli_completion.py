"""The completion script, run in a real bash."""

import shutil
import subprocess

import pytest

from trainformer.cli import app, completion
from trainformer.cli.components import summaries

ASK = r"""
source script.sh
ask() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
  "$(complete -p trainformer | sed -E 's/.*-F ([^ ]+).*/\1/')" trainformer "${@: -1}" "${@: -2:1}"
  echo "${COMPREPLY[@]}"
}
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The completions of bash for several incomplete lines."""
    folder = tmp_path_factory.mktemp("bash")
    (folder / "script.sh").write_text(completion.script("bash"))
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "base.yaml").touch()
    lines = [
        ["tr"],
        [""],
        ["ckpt", ""],
        ["ckpt", "ver"],
        ["ckpt", "export", "--f"],
        ["train", "--batch"],
        ["train", "--task", "Caus"],
        ["train", "--task", "SSL.d"],
        ["train", "--task", "=", "Caus"],  # how bash splits --task=Caus
        ["train", "--lr=1", "--adapter", "="],
        ["runs", "--sort", "b"],
        ["evaluate", "ru"],
        ["run", "ba"],
        ["completion", "z"],
    ]
    text = ASK + "".join(f"ask trainformer {' '.join(repr(word) for word in line)}\n" for line in lines)
    done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {" ".join(line): set(reply.split()) for line, reply in zip(lines, done.stdout.splitlines(), strict=True)}


def test_commands_and_actions(answers):
    assert answers["tr"] == {"train"}
    assert answers[""] >= set(app.COMMANDS)
    assert answers["ckpt "] >= {"list", "inspect", "verify", "compare", "export", "protect", "unprotect"}
    assert answers["ckpt ver"] == {"verify"}


def test_options_and_their_values(answers):
    assert answers["ckpt export --f"] == {"--force"}
    assert answers["train --batch"] == {"--batch-size"}
    assert answers["runs --sort b"] == {"best"}
    assert answers["completion z"] == {"zsh"}
    assert answers["train --task Caus"] == answers["train --task = Caus"] == {"CausalLM"}
    assert answers["train --lr=1 --adapter ="] >= {"LoRA", "QLoRA"}
    known = {name for name in summaries("tasks") if name.startswith("SSL.d")}
    assert "SSL.dino" in known
    assert answers["train --task SSL.d"] == known


def test_files_and_folders(answers):
    assert {reply.rstrip("/") for reply in answers["evaluate ru"]} == {"runs"}
    assert answers["run ba"] == {"base.yaml"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    assert app.main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert all(word in out for word in ("batch-size", "verify", "CausalLM"))
    assert err == ""
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=out, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
