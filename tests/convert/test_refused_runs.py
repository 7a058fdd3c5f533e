"""Wrong places, wrong flags, Ctrl-C and a full disk: convert ends in one line, leaving nothing."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest
from damage import files, one_line, refusal
from tiny_checkpoints import dolomite, gpt_neox, llama

from mlx_selective.cli import main


@pytest.fixture
def refused(tmp_path, capfd):
    """Runs convert on a source; gives the line that refuses it."""
    (tmp_path / "out").mkdir()
    return functools.partial(refusal, tmp_path, capfd)


# Where things are ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["no/such/folder", "./nothing", "nothing", "~nobody/x/y", "a" * 300]
)
def test_a_path_that_is_nothing(refused, path):
    line = refused(path)
    assert f"{path}: no such folder, and not a Hub id (owner/name)" in line


def test_a_file_instead_of_a_folder(refused, tmp_path):
    source = llama().save(tmp_path / "source")
    line = refused(source / "model.safetensors")
    assert f"{source / 'model.safetensors'} is a file; give the folder" in line


def test_an_empty_folder(refused, tmp_path):
    (tmp_path / "source").mkdir()
    assert f"{tmp_path / 'source' / 'config.json'}: no such file" in refused(tmp_path / "source")


def test_a_hub_id_that_cannot_be_fetched(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("nobody-here/nothing")
    assert "nobody-here/nothing: no such folder, and the Hub did not give it: " in line


def test_a_hub_model_of_an_unknown_layout_is_refused_before_its_weights(
    refused, tmp_path, monkeypatch
):
    source, asked = llama(model_type="gemma2").save(tmp_path / "cached"), []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *a, **k: asked.append(k) or str(source)
    )
    assert "model_type 'gemma2'" in refused("owner/name")
    assert len(asked) == 1 and "*.safetensors" not in asked[0]["allow_patterns"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_a_target_that_exists(refused, tmp_path, kind):
    target = tmp_path / "out" / "model"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    line = refused(llama().save(tmp_path / "source"))
    assert f"Cannot save to the path {target} as it already exists" in line


def test_a_target_under_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "model"
    line = refused(llama().save(tmp_path / "source"), target=target)
    assert f"{target}: cannot be written (" in line


def test_a_target_with_too_long_a_name(refused, tmp_path):
    target = tmp_path / "out" / ("x" * 300) / "model"
    assert "cannot be written (File name too long)" in refused(
        llama().save(tmp_path / "source"), target=target
    )


def test_a_target_that_may_not_be_written(refused, tmp_path, monkeypatch):
    # Not by chmod: tests may run as root, whom it does not stop.
    def forbidden(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", forbidden)
    target = tmp_path / "out" / "new" / "model"
    line = refused(llama().save(tmp_path / "source"), target=target)
    assert f"{target}: cannot be written (Permission denied)" in line


def test_folders_made_on_the_way_are_taken_back(refused, tmp_path):
    source = llama().save(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    line = refused(source, target=tmp_path / "out" / "new" / "deep" / "model")
    assert "no tokenizer" in line
    assert list((tmp_path / "out").iterdir()) == []


# Flags --------------------------------------------------------------------------------------------

FLAGS = {
    "attention against dolomite": (
        dolomite(), ["--attention", "selective"], "--attention selective", "stick_breaking",
    ),
    "attention against SSA": (gpt_neox({}), ["--attention", "softmax"], "--attention softmax"),
    "budget without selective": (llama(), ["--budget", "64"], "--budget", "softmax"),
    "budget with stick-breaking": (dolomite(), ["--budget", "64"], "--budget", "stick_breaking"),
    "budget 1": (llama(), ["--attention", "selective", "--budget", "1"], "budget must be at least"),
    "budget below 0": (llama(), ["--attention", "selective", "--budget", "-5"], "budget", "-5"),
    "7 bits": (llama(), ["-q", "--q-bits", "7"], "--q-bits", "7"),
    "0 bits": (llama(), ["-q", "--q-bits", "0"], "--q-bits", "0"),
    "group size 13": (llama(), ["-q", "--q-group-size", "13"], "--q-group-size", "13"),
    "group size 0": (llama(), ["-q", "--q-group-size", "0"], "--q-group-size", "0"),
    "group size below 0": (llama(), ["-q", "--q-group-size", "-64"], "--q-group-size", "-64"),
    "bits of a mode": (llama(), ["-q", "--q-mode", "mxfp4", "--q-bits", "8"], "mxfp4", "8"),
    "group size of a mode": (
        llama(), ["-q", "--q-mode", "mxfp4", "--q-group-size", "64"], "mxfp4", "64",
    ),
    "nothing to quantise": (
        llama(intermediate_size=64), ["-q", "--q-group-size", "128"], "--q-group-size 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_do_not_go_together(refused, tmp_path, name):
    checkpoint, flags, *words = FLAGS[name]
    line = refused(checkpoint.save(tmp_path / "source"), *flags)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("flag", "value"), [("--attention", "linear"), ("--dtype", "int8"), ("--q-mode", "int4")]
)
def test_values_that_no_flag_has(tmp_path, capsys, flag, value):
    target = tmp_path / "model"
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--hf-path", str(tmp_path), "--mlx-path", str(target), flag, value])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"mlx-selective convert: error: argument {flag}: invalid choice")
    assert value in last and not target.exists()


# Cut off while writing ----------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, capfd, monkeypatch):
    """Converts while something happens in the middle of writing; gives the code and stderr."""
    source = llama().save(tmp_path / "source")

    def run(happening: BaseException):
        def half_written(folder, model, **_):
            (folder / "model.safetensors").write_bytes(b"half")
            raise happening

        monkeypatch.setattr("mlx_selective.convert.pipeline.save_model", half_written)
        before = files(tmp_path)
        target = tmp_path / "new" / "model"
        code = main(["convert", "--hf-path", str(source), "--mlx-path", str(target)])
        assert files(tmp_path) == before
        return code, capfd

    return run


def test_ctrl_c(stopped):
    code, capfd = stopped(KeyboardInterrupt())
    assert code == 130
    assert capfd.readouterr().err.strip() == "mlx-selective convert: interrupted."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_command_takes_back_what_was_begun(number, tmp_path, monkeypatch):
    source = llama().save(tmp_path / "source")
    before = files(tmp_path)

    def end(folder, model, **_):
        assert list(tmp_path.glob(".model.partial-*"))
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr("mlx_selective.convert.pipeline.save_model", end)
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--hf-path", str(source), "--mlx-path", str(tmp_path / "model")])
    assert ended.value.code == 128 + number
    assert files(tmp_path) == before
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("[write] Unable to write 512 bytes.")],
    ids=["OSError", "mlx's RuntimeError"],
)
def test_a_full_disk(stopped, error):
    code, capfd = stopped(error)
    line = one_line(capfd, "convert")
    assert code == 2 and "new/model: cannot be written (" in line and str(error.args[-1]) in line


def small_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_for_real(tmp_path):
    source = llama().save(tmp_path / "source")
    before = files(tmp_path)
    command = ["convert", "--hf-path", str(source), "--mlx-path", str(tmp_path / "model")]
    ended = subprocess.run(
        [sys.executable, "-m", "mlx_selective", *command],
        capture_output=True, text=True, preexec_fn=small_files,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"mlx-selective convert: error: {tmp_path / 'model'}: cannot")
    assert ended.stderr.count("\n") == 1
    assert files(tmp_path) == before
