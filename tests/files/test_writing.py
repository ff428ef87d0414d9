"""Where --json writes: regular files whole or not at all, everything else through and never replaced."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from isoload import files
from isoload.files import check_target, write_json

# The file alone: to import isoload takes seconds.
CODE = f"import runpy; write_json = runpy.run_path({files.__file__!r})['write_json']; print('before')"


def test_files_are_replaced_whole_and_keep_their_mode(tmp_path):
    target = tmp_path / "out.json"
    target.write_text("old")
    target.chmod(0o640)
    write_json({"a": 1.5}, str(target))
    assert json.loads(target.read_text()) == {"a": 1.5} and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "out.json"
    target.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isoload.files.os.replace", full)
    with pytest.raises(OSError, match="No space left.*out.json"):
        write_json({"a": 1}, str(target))
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "there").mkdir()
    first, last, real = tmp_path / "first", tmp_path / "last", tmp_path / "there" / "real.json"
    first.symlink_to(last)
    last.symlink_to(real)
    for value in (1, 2):  # the file is not there yet, then it is
        write_json(value, str(first))
        assert first.is_symlink() and last.is_symlink() and json.loads(real.read_text()) == value
    assert os.listdir(tmp_path / "there") == ["real.json"]


def test_a_device_stays_a_device(tmp_path):
    """Of our own where nodes may be made, so that a mistake costs nothing; else the system's."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        device = "/dev/null"
    before = os.stat(device)
    write_json({"a": 1}, str(device))
    after = os.stat(device)
    assert stat.S_ISCHR(after.st_mode) and (after.st_ino, after.st_rdev) == (before.st_ino, before.st_rdev)


def test_a_full_device_is_named():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_json({"a": 1}, "/dev/full")


def test_a_pipe_gets_the_text(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_json({"a": 1}, str(pipe))
    reader.join(10)
    assert json.loads(got[0]) == {"a": 1} and stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("into", ["pipe", "file"])
def test_stdout_by_name(tmp_path, target, into):
    """In order with what is printed, also where stdout is a regular file."""
    command = [sys.executable, "-c", f"{CODE}; write_json({{'a': 1}}, {target!r}); print('after')"]
    if into == "pipe":
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    else:
        with (tmp_path / "out").open("w") as file:
            subprocess.run(command, stdout=file, check=True)
        text = (tmp_path / "out").read_text()
        assert os.listdir(tmp_path) == ["out"]
    assert text == 'before\n{\n  "a": 1\n}\nafter\n'


def test_json_refuses_what_json_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, str(tmp_path / "out.json"))
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="JSON must not be nested so deep"):
        write_json(nested, str(tmp_path / "out.json"))
    assert os.listdir(tmp_path) == []


def test_a_target_in_no_folder_is_refused_at_once(tmp_path):
    for good in (None, "-", "out.json", "/dev/null", "/dev/stdout", str(tmp_path / "out.json")):
        check_target(good)
    lost = tmp_path / "lost"
    lost.symlink_to(tmp_path / "none" / "out.json")
    for bad in (str(tmp_path / "none" / "out.json"), str(tmp_path), str(lost)):
        with pytest.raises(ValueError, match="json must be a file in an existing folder or -, got '"):
            check_target(bad)


def test_links_in_a_circle_are_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links: '.*/a'"):
        check_target(str(tmp_path / "a"))
