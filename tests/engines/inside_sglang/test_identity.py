"""What must be equal for a page to be had, beside SGLang's hash of it; and what is refused when the backend is attached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostkv.connector.sglang.identity import identity_of
from rig import Rank, hashes, kv_pool, make_model, serve
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_context

from tests.support import Sidecar

Make = Callable[..., Rank]
KEYS = hashes(3)


def test_layouts_page_sizes_types_heads_and_ranks_never_mix(sidecar: Sidecar, rank: Make) -> None:
    """All of these say the same served name and the same hashes."""
    rank(sidecar).save(KEYS)
    others = [
        rank(sidecar, layout="page_first_direct"),
        rank(sidecar, layout="page_head"),
        rank(sidecar, layout="layer_first"),
        rank(sidecar, layout="page_first", mla=True),
        rank(sidecar, pool=kv_pool("page_first", False, page=32)),
        rank(sidecar, pool=kv_pool("page_first", False, page=8)),
        rank(sidecar, pool=kv_pool("page_first", False, dtype=torch.float16)),
        rank(sidecar, pool=kv_pool("page_first", False, heads=4)),
        rank(sidecar, pp_size=2, pp_rank=0),
        rank(sidecar, pp_size=2, pp_rank=1),
        rank(sidecar, attn_cp_size=2, attn_cp_rank=0),
        rank(sidecar, attn_cp_size=2, attn_cp_rank=1),
    ]
    assert [other.storage.batch_exists(KEYS) for other in others] == [0] * len(others)
    assert len({other.storage._parts["kv"].store.fingerprint for other in others}) == len(others)
    assert rank(sidecar).storage.batch_exists(KEYS) == 3
    assert rank(sidecar, dp_rank=1).storage.batch_exists(KEYS) == 3, "each data-parallel rank has all of the KV"


def had(sidecar: Sidecar, rank: Make, **more: object) -> int:
    """Pages that an engine of what this process serves finds; it saves them then."""
    one = rank(sidecar, **more)
    found = one.storage.batch_exists(KEYS)
    one.save(KEYS)
    return found


def test_weights_and_what_is_computed_with_them(sidecar: Sidecar, rank: Make, tmp_path: Path) -> None:
    """Models of one name, in folders of one name."""
    found = []
    for arguments in (
        {"model": make_model(tmp_path / "a" / "model")},
        {"model": make_model(tmp_path / "b" / "model", weights=b"[]")},
        {"model": make_model(tmp_path / "c" / "model", rope_theta=5e5)},
        {"model": tmp_path / "a" / "model", "json_model_override_args": '{"rope_theta": 500000.0}'},
        {"model": tmp_path / "a" / "model", "dtype": "float16"},
        {"model": tmp_path / "a" / "model", "kv_cache_dtype": "fp8_e5m2"},
        {"model": tmp_path / "a" / "model", "weight_version": "2"},
        {"model": tmp_path / "a" / "model", "modelopt_quant": "fp8"},
        {"model": tmp_path / "a" / "model", "modelopt_quant": "int4_awq"},
        {"model": tmp_path / "a" / "model", "kt_weight_path": "/experts"},
    ):
        serve(**arguments, served_model_name="same")
        found.append(had(sidecar, rank))
    assert found == [0] * 10
    serve(make_model(tmp_path / "copy" / "model"), served_model_name="another")
    assert had(sidecar, rank) == 3


def test_the_users_revision_stands_for_the_weights(sidecar: Sidecar, rank: Make, tmp_path: Path) -> None:
    serve(make_model(tmp_path / "a" / "model"))
    assert had(sidecar, rank, extra={"revision": "r1"}) == 0
    serve(make_model(tmp_path / "b" / "model", weights=b"[]"))
    assert [had(sidecar, rank, extra={"revision": word}) for word in ("r1", "r2")] == [3, 0]


def test_files_that_change_before_the_backend_is_attached_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    serve(model)
    before = identity_of(None)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights + b" ")
    assert identity_of(None) != before
    (model / "model.safetensors").write_bytes(weights)
    assert identity_of(None) == before


def test_adapters_by_their_files(sidecar: Sidecar, rank: Make, tmp_path: Path) -> None:
    """The ones that the engine was started with are told apart by name and path alone in SGLang's hashes."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    found = []
    for content in (b"1", b"2", b"1"):
        (folder / "adapter_model.safetensors").write_bytes(content)
        serve(tmp_path / "model", lora_paths=[LoRARef(lora_name="a", lora_path=str(folder))], enable_lora=True)
        found.append(had(sidecar, rank))
    assert found == [0, 0, 3]


def test_weights_that_are_replaced_in_a_running_engine(sidecar: Sidecar, rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    one = rank(sidecar)
    one.save(KEYS)
    get_context().override("test", weight_version="new")  # as SGLang does for an update of weights
    indices = one.alloc(3)
    for _ in range(2):
        assert one.storage.batch_exists(KEYS) == 0
        assert one.storage.batch_get_v1(KEYS, indices) == [False] * 3
        assert one.storage.batch_set_v1(hashes(3, "more"), indices) == [False] * 3
    assert caplog.text.count("weights were replaced") == 1
    assert rank(sidecar).storage.batch_exists(KEYS) == 0  # attached again


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"load_format": "dummy"}, "weights are made up"),
        ({"nnodes": 2}, "over several hosts"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding is not supported"),
        ({"model": Path("org/name")}, '"revision" in the extra config'),
    ],
)
def test_engines_that_have_no_identity(arguments: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hostkv.connector.sglang.identity as identity

    serve(tmp_path / "model")
    args = identity.get_server_args()
    monkeypatch.setattr(identity, "get_server_args", lambda: Overridden(args, arguments))
    if "model" in arguments:
        monkeypatch.setattr(identity, "weights_in_use", lambda: ("org/name", "default"))
    with pytest.raises(ValueError, match=why):
        identity_of(None)
    if "load_format" in arguments or "model" in arguments:
        assert identity_of("the user's word").revision.startswith("the user's word as:")


class Overridden:
    """Server arguments, but for some."""

    def __init__(self, args: object, others: dict[str, object]) -> None:
        self._args, self._others = args, others

    def __getattr__(self, name: str) -> object:
        return self._others[name] if name in self._others else getattr(self._args, name)


def test_a_layout_that_cannot_be_stored(sidecar: Sidecar, rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = kv_pool("page_first", False)
    pool.layout = "page_unified"
    with pytest.raises(
        ValueError, match=r"host pool 'kv' \(MHATokenToKVPoolHost, layout page_unified\) cannot be stored: Unsupported layout"
    ):
        rank(sidecar, pool=pool)
    with pytest.raises(ValueError, match="'tp_lcm_size' is not supported"):
        rank(sidecar, tp_lcm_size=4)
    with pytest.raises(ValueError, match="size 65 is over the limit of 64"):
        rank(sidecar, tp=(0, 65))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"endpiont": "ipc:///x"}, "'endpiont' is unknown, the nearest known key is 'endpoint'"),
        ({"revision": 3}, "'revision' is 3, must be a str"),
        ({"copy_threads": 0}, "copy_threads is 0, must be 1..64"),
        ({"config": "/nowhere.yaml"}, "cannot read 'config' '/nowhere.yaml'"),
        ({"config": {"a": 1}}, "must be a str"),
        ({"interface_v2": 1}, "the nearest known key is 'interface_v1'"),
    ],
)
def test_bad_options_are_errors_at_start(sidecar: Sidecar, rank: Make, extra: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        rank(sidecar, extra=extra)


def test_options_in_a_file(sidecar: Sidecar, rank: Make, tmp_path: Path) -> None:
    file = tmp_path / "hostkv.yaml"
    file.write_text("copy_threads: 2\ntier_wait_s: 3\n")
    one = rank(sidecar, extra={"config": str(file), "tier_wait_s": 0.25, "allocator": "shm"})
    assert (one.storage._client.copy_threads, one.storage._client.tier_wait_s) == (2, 0.25)
    for text, why in (("copy_thread: 2", "the nearest known key is 'copy_threads'"), ("- a", "must hold names"), ("a: [", "cannot read")):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            rank(sidecar, extra={"config": str(file)})


def test_the_slow_path_is_told(sidecar: Sidecar, rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rank(sidecar)
        assert "interface_v1" not in caplog.text
        rank(sidecar, extra={"interface_v1": 0})
    assert 'lacks "interface_v1": 1' in caplog.text
