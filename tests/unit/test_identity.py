"""What names a model's weights: equal for copies, different for whatever computes another KV, refused where nobody can tell."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hostkv.connector.identity import CHUNK_BYTES, IdentityError, model_identity, weights_fingerprint, weights_state

BIG_BYTES = 2 * CHUNK_BYTES + 1000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "org" / "model-a"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"layers": 4}')
    (model / "model.safetensors").write_bytes(bytes(BIG_BYTES))
    (model / "tokenizer.json").write_text("{}")
    return model


def patch(file: Path, offset: int, value: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(value)


def test_copies_of_a_folder_are_one_model(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "model-a"
    shutil.copytree(folder, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    assert model_identity(str(copy)) == model_identity(str(folder))
    assert model_identity(str(folder))[0] == "model-a"


def test_a_relative_path_and_a_link_name_the_same_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (tmp_path / "link").symlink_to(folder)
    assert model_identity("model-a") == model_identity(str(folder)) == model_identity(str(tmp_path / "link"))


@pytest.mark.parametrize("offset", [0, 12345, CHUNK_BYTES - 1, CHUNK_BYTES, BIG_BYTES // 3, BIG_BYTES - 1])
def test_one_other_byte_anywhere_is_another_model(folder: Path, offset: int) -> None:
    before = weights_fingerprint(folder)
    patch(folder / "model.safetensors", offset, b"x")
    assert weights_fingerprint(folder) != before


def test_other_code_in_the_folder_is_another_model(folder: Path) -> None:
    seen = {weights_fingerprint(folder)}
    for code in ("SCALE = 1", "SCALE = 2"):
        (folder / "modeling_a.py").write_text(code)
        seen.add(weights_fingerprint(folder))
    assert len(seen) == 3


def test_a_changed_file_shows_without_reading_it(folder: Path) -> None:
    weights = folder / "model.safetensors"
    seen = {weights_state(folder)}
    assert weights_state(folder) in seen
    os.utime(weights, ns=(1, 1))
    seen.add(weights_state(folder))
    other = folder / "other"
    other.write_bytes(bytes(BIG_BYTES))
    os.utime(other, ns=(1, 1))
    other.replace(weights)
    seen.add(weights_state(folder))
    assert len(seen) == 3


def test_config_file_names_and_sizes_are_part_of_it(folder: Path) -> None:
    seen = {weights_fingerprint(folder)}
    (folder / "config.json").write_text('{"layers": 5}')
    seen.add(weights_fingerprint(folder))
    patch(folder / "model.safetensors", BIG_BYTES, b"\0")
    seen.add(weights_fingerprint(folder))
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    seen.add(weights_fingerprint(folder))
    (folder / "model-00002.safetensors").write_bytes(b"")
    seen.add(weights_fingerprint(folder))
    assert len(seen) == 5


def test_what_computes_nothing_is_no_part_of_it(folder: Path) -> None:
    before = weights_fingerprint(folder)
    (folder / "tokenizer.json").write_text('{"other": 1}')
    (folder / "README.md").write_text("text")
    assert weights_fingerprint(folder) == before


def test_a_single_weights_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"1")
    (tmp_path / "b.gguf").write_bytes(b"2")
    assert weights_fingerprint(tmp_path / "a.gguf") != weights_fingerprint(tmp_path / "b.gguf")


def test_a_snapshot_folder_is_its_repository_at_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert model_identity(str(snapshot)) == ("org/name", f"commit:{COMMIT}") == model_identity("org/name", COMMIT)


def test_the_users_revision_wins(folder: Path) -> None:
    assert model_identity(str(folder), revision="r7") == ("model-a", "r7")
    assert model_identity("org/name", COMMIT, "r7") == ("org/name", "r7")


@pytest.mark.parametrize("commit", [None, "main", COMMIT[:12]])
def test_a_hub_model_without_a_commit_is_refused_and_the_fix_named(commit: str | None) -> None:
    with pytest.raises(IdentityError, match='"revision" in the extra config'):
        model_identity("org/name", commit)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IdentityError, match="holds no weights"):
        weights_fingerprint(tmp_path)


def test_an_adapter_is_its_weights_and_its_configuration(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    before = weights_fingerprint(folder)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16}')
    assert weights_fingerprint(folder) != before


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="is not on this machine"):
        weights_fingerprint(tmp_path / "absent")
