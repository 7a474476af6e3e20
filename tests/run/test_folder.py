"""The files of a run folder, also when they cannot be written."""

import shutil

import pytest

from trainformer.context import PipelineConfig
from trainformer.run.folder import RunFolder


@pytest.mark.parametrize("kind", ["status", "recording"])
def test_a_file_that_cannot_be_written_does_not_hide_the_error(tmp_path, caplog, kind):
    folder = RunFolder(tmp_path / "run", "checkpoints")

    def break_down(error=None):
        context = folder.status(lambda: "finished") if kind == "status" else folder.recording(PipelineConfig())
        with context:
            shutil.rmtree(folder.path)
            folder.path.touch()  # a file: nothing can be written in it
            if error is not None:
                raise error

    with pytest.raises(RuntimeError, match="what really happened"):
        break_down(RuntimeError("what really happened"))
    assert "could not be written" in caplog.text
    folder.path.unlink()
    with pytest.raises(FileExistsError):  # without another error, this one is raised
        break_down()
