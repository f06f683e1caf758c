"""What must be equal for a block to be had, as the engine's own hashing and our namespace tell it: the same again is a hit, and whatever
changes the KV is none."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.utils.hashing as hashing
from hostkv.connector.vllm import scheduler
from hostkv.connector.vllm.identity import _commit, _settings
from rig import BLOCK, Engine, full_attention, prompt
from test_parts import MODELS, ROOM
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.engines.llama import make_model
from tests.support import Sidecar

Start = Callable[..., Engine]
PROMPT = prompt(6 * BLOCK + 3, "identity")
ALL = 6 * BLOCK
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 768,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def had(sidecar: Sidecar, start: Start, **request: Any) -> int:
    """Tokens that a new engine gets for a request, which is then done again in it, by its own cache and by the sidecar."""
    return had_by(start(sidecar), **request)


def had_by(engine: Engine, whole: int = ALL, **request: Any) -> int:
    """`whole`: what it may have at most."""
    external = engine.ask(**request).external
    for _ in range(2):
        assert engine.ask(**request).cached == whole
        engine.forget()
    assert engine.ask(**request).external == whole
    engine.check_idle()
    return external


def test_salt(sidecar: Sidecar, start: Start) -> None:
    assert [had(sidecar, start, prompt=PROMPT, salt=salt) for salt in ("a", "b", "a", None, None)] == [0, 0, ALL, 0, ALL]


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_adapters_by_name_path_and_content(sidecar: Sidecar, start: Start, tmp_path: Path) -> None:
    one, other = adapter(tmp_path / "one", b"1"), adapter(tmp_path / "other", b"2")

    def with_adapter(name: str, path: Path) -> int:
        means = (path / "adapter_model.safetensors").read_bytes()
        return had(sidecar, start, prompt=PROMPT, means=means, lora_request=LoRARequest(name, 1, str(path)))

    assert had(sidecar, start, prompt=PROMPT) == 0
    assert [with_adapter("a", one), with_adapter("a", one)] == [0, ALL]
    assert [with_adapter("a", other), with_adapter("a", other)] == [0, ALL]
    (one / "adapter_model.safetensors").write_bytes(b"3")  # another version under the same name and path, for an engine started later
    assert [with_adapter("a", one), with_adapter("a", one)] == [0, ALL]
    assert had(sidecar, start, prompt=PROMPT) == ALL


def test_adapters_by_what_an_engine_makes_of_their_files(sidecar: Sidecar, start: Start, tmp_path: Path) -> None:
    path = str(adapter(tmp_path / "one", b"1"))

    def with_adapter(experts_in_one: bool = False, **arguments: Any) -> int:
        engine = start(sidecar, enable_lora=True, **arguments)
        lora = LoRARequest("a", 1, path, is_3d_lora_weight=experts_in_one)
        return had_by(engine, prompt=PROMPT, means=(experts_in_one, arguments), lora_request=lora)

    several: list[dict[str, Any]] = [
        {},
        {"lora_target_modules": []},
        {"lora_target_modules": ["o_proj"]},
        {"lora_target_modules": ["o_proj", "q_proj"]},
        {"lora_dtype": "float16"},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_mixed_moe_lora_format": True, "experts_in_one": True},
    ]
    assert [with_adapter(**one) for one in several] == [0] * len(several)
    assert [with_adapter(**one) for one in several] == [ALL] * len(several)
    engine = start(sidecar, enable_lora=True, lora_target_modules=["q_proj", "o_proj"], lora_dtype="bfloat16", max_loras=2)
    means = (False, {"lora_target_modules": ["o_proj", "q_proj"]})
    assert engine.ask(PROMPT, means=means, lora_request=LoRARequest("a", 1, path)).external == ALL, "said otherwise"
    assert [start(sidecar, **one).ask(PROMPT).external for one in ({}, {"enable_lora": True, **several[2]})] == [0, ALL], (
        "without an adapter"
    )


def test_an_adapter_whose_files_change_while_the_engine_runs_is_not_cached(sidecar: Sidecar, start: Start, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one", b"1")
    engine = start(sidecar)
    lora = LoRARequest("a", 1, str(path))
    engine.ask(PROMPT, means=b"1", lora_request=lora)
    saved = sidecar.status()["blocks"]["ready"]
    (path / "adapter_model.safetensors").write_bytes(b"22")
    engine.forget()  # what vLLM itself has of the adapter's old files is its own affair
    answer = engine.ask(PROMPT, means=b"22", lora_request=lora)
    assert (answer.external, sidecar.status()["blocks"]["ready"]) == (0, saved)
    engine.check_idle()


@pytest.mark.parametrize("in_place", [True, False])
def test_nothing_is_cached_of_an_adapter_whose_weights_were_replaced(
    sidecar: Sidecar, start: Start, tmp_path: Path, in_place: bool
) -> None:
    """The engine goes on with requests of the old adapter, and computes them with the weights that it loaded last under their number."""
    old = LoRARequest("a", 1, str(adapter(tmp_path / "old", b"1")))
    new = LoRARequest("a", 1, str(adapter(tmp_path / "new", b"2")), load_inplace=in_place)
    engine = start(sidecar, extra={"save_decode": True})
    running = engine.add(PROMPT, 200, means="old", lora_request=old)
    engine.step_until(lambda: len(engine.answers[running].tokens) > 3 * BLOCK)
    saved = sidecar.status()["blocks"]["ready"]
    assert saved > 6

    added = engine.add(PROMPT, means="new", lora_request=new)
    engine.step_until(lambda: engine.answers[added].finish)
    engine.core.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert sidecar.status()["blocks"]["ready"] == saved + 6 * in_place, "without being told to, the engine may keep the weights that it has"
    params = engine.answers[running].params
    assert params is not None
    assert params["hostkv"]["loaded_tokens"] == 0

    late = engine.ask(PROMPT, means="new", lora_request=old)
    assert (late.cached, late.external) == (0, 0), "nor does the engine keep what the old request has computed since"
    engine.forget()
    assert engine.ask(PROMPT, means="new", lora_request=new).external == 0, "is it that adapter's weights still, or the late one's?"
    engine.check_idle()
    assert start(sidecar).ask(PROMPT, means="old", lora_request=old).external == ALL
    assert start(sidecar).ask(PROMPT, means="new", lora_request=new).external == ALL * in_place


def test_an_adapter_loaded_again_from_where_it_was_is_not_cached(sidecar: Sidecar, start: Start, tmp_path: Path) -> None:
    path = str(adapter(tmp_path / "one", b"1"))
    engine = start(sidecar)
    engine.ask(PROMPT, lora_request=LoRARequest("a", 1, path))
    saved = sidecar.status()["blocks"]["ready"]
    engine.forget()
    for _ in range(2):
        again = LoRARequest("a", 1, path, load_inplace=True)
        assert engine.ask(prompt(6 * BLOCK, "more"), means="again", lora_request=again).external == 0
        engine.forget()
    assert sidecar.status()["blocks"]["ready"] == saved


def test_images_by_identifier_and_place(sidecar: Sidecar, start: Start) -> None:
    """Of two prompts with the same tokens, since an image is a run of equal ones."""

    def with_images(*images: tuple[str, int]) -> int:
        length = BLOCK + 4
        engine = start(sidecar)
        engine.scheduler.max_num_encoder_input_tokens = 1 << 20  # the model has no images, and the scheduler room for none
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
        instead = {at + i: (name, i) for name, at in images for i in range(length)}
        features = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=at, length=length), mm_hash=name
            )
            for name, at in images
        ]
        answer = engine.ask([7] * len(PROMPT), instead=instead, mm_features=features)
        engine.check_idle()
        return answer.external

    assert [with_images(("cat", 20)), with_images(("cat", 20))] == [0, ALL]
    assert with_images(("dog", 20)) == BLOCK, "the block before the image is the same"
    assert with_images(("cat", 21)) == BLOCK
    assert [with_images(("cat", 20), ("dog", 50)), with_images(("cat", 20), ("dog", 50))] == [3 * BLOCK, ALL]
    assert with_images(("cat", 20), ("cow", 50)) == 3 * BLOCK
    assert with_images(("cat", 20)) == ALL


def test_embeddings_instead_of_tokens(sidecar: Sidecar, start: Start) -> None:
    def with_embeddings(*seeds: int) -> int:
        embeds = torch.cat([torch.rand(2 * BLOCK, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        instead = {at: tuple(row.tolist()) for at, row in enumerate(embeds)}
        engine = start(sidecar)
        answer = engine.ask([0] * len(embeds), instead=instead, prompt_token_ids=None, prompt_embeds=embeds)
        engine.check_idle()
        return answer.external

    whole = 6 * BLOCK - BLOCK  # the last block holds the last token
    assert [with_embeddings(1, 2, 3), with_embeddings(1, 2, 3)] == [0, whole]
    assert with_embeddings(1, 4, 3) == 2 * BLOCK
    assert start(sidecar).ask([0] * 6 * BLOCK).external == 0, "tokens are something else"


@pytest.mark.parametrize(
    "other",
    [
        {"specs": full_attention(layers=3)},
        {"specs": dict(list(full_attention(layers=3).items())[1:])},  # as many layers, as another cut of a pipeline may have them
        {"specs": full_attention(heads=1)},
        {"specs": full_attention(head_size=8)},
        {"specs": full_attention(block_tokens=32)},
        {"ranks": 2},
        {"model": {"rope_theta": 5000.0}},
        {"extra": {"revision": "another"}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"dtype": "float32"},
    ],
    ids=lambda other: ",".join(other),
)
def test_another_model_or_engine_gets_nothing(sidecar: Sidecar, start: Start, other: dict[str, Any]) -> None:
    start(sidecar).ask(PROMPT)
    assert start(sidecar, **other).ask(PROMPT).external == 0
    assert start(sidecar, **other).ask(PROMPT).external == ALL
    assert start(sidecar).ask(PROMPT).external == ALL


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        ({}, True),
        ({"rope_parameters": LONGROPE}, False),
        ({"sub_model": {"model_type": "llama4_text"}}, False),
    ],
    ids=["plain", "longrope", "llama4"],
)
def test_engines_for_longer_prompts_share_where_short_ones_are_computed_alike(
    sidecar: Sidecar, start: Start, model: dict[str, Any], shares: bool
) -> None:
    lengths = [1024, 512, 1024]
    assert [start(sidecar, model=model, max_model_len=length).ask(PROMPT).external for length in lengths] == [0, ALL * shares, ALL]


def test_how_weights_are_quantized_and_images_are_prepared_is_told_apart_and_the_same_everywhere(sidecar: Sidecar, start: Start) -> None:
    model = start(sidecar).config.model_config

    def described(quantization: str | None = None, **media: Any) -> str:
        changed = copy.copy(model)
        changed.quantization_config = resolve_quantization_config(quantization, None)
        changed.multimodal_config = MultiModalConfig(**media) if media else None
        return json.dumps(_settings(changed), default=str)

    several = [
        described(),
        described("fp8_per_tensor"),
        described("fp8_per_block"),
        described(mm_processor_kwargs={"a": 1}),
        described(mm_processor_kwargs={"a": 2}),
        described(video_pruning_rate=0.5),
    ]
    assert len(set(several)) == len(several)
    assert not [one for one in several if " object at 0x" in one]


def test_the_commit_is_that_of_the_weights_and_not_of_a_configuration_from_elsewhere() -> None:
    config = SimpleNamespace(_commit_hash="c" * 40)
    assert _commit(SimpleNamespace(hf_config=config, hf_config_path=None, revision="main")) == "c" * 40
    assert _commit(SimpleNamespace(hf_config=config, hf_config_path="org/other", revision="e" * 40)) == "e" * 40


def test_hashes_that_begin_with_a_random_number_are_of_one_engine_alone(
    sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = SimpleNamespace(xxh3_128_digest=lambda content: hashlib.blake2b(content, digest_size=16).digest())
    monkeypatch.setattr(hashing, "_xxhash", digest)  # a library that vLLM does not bring
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    engine = start(sidecar, prefix_caching_hash_algo="xxhash")
    engine.ask(PROMPT)
    engine.forget()
    assert engine.ask(PROMPT).external == ALL
    engine.close()
    assert start(sidecar, prefix_caching_hash_algo="xxhash").ask(PROMPT).external == 0
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert [start(sidecar, prefix_caching_hash_algo="xxhash").ask(PROMPT).external for _ in range(2)] == [0, ALL]


def test_data_parallel_replicas_share_with_each_other_and_with_an_engine_alone(sidecar: Sidecar, start: Start) -> None:
    engines = [start(sidecar, replica=0), start(sidecar, replica=1), start(sidecar)]
    assert [engine.ask(PROMPT).external for engine in engines] == [0, ALL, ALL]


def test_a_drafter_with_layers_of_its_own_is_part_of_the_identity(sidecar: Sidecar, start: Start, tmp_path: Path) -> None:
    def with_drafter(method: str, weights: bytes) -> int:
        drafter = make_model(tmp_path / weights.hex(), weights, num_hidden_layers=2)
        config = {"method": method, "model": str(drafter), "num_speculative_tokens": 2}
        engine = start(sidecar, speculative_config=config, specs=full_attention(layers=3))
        return had_by(engine, ALL - BLOCK * (method == "eagle"), prompt=PROMPT)

    start(sidecar, specs=full_attention(layers=3)).ask(PROMPT)
    assert [with_drafter("draft_model", b"1"), with_drafter("draft_model", b"1")] == [0, ALL]
    assert [with_drafter("draft_model", b"2"), with_drafter("draft_model", b"2")] == [0, ALL]
    assert [with_drafter("eagle", b"1"), with_drafter("eagle", b"1")] == [0, ALL - BLOCK], "as vLLM, without the last block"
    start(sidecar).ask(PROMPT)
    assert start(sidecar, drafts=2).ask(PROMPT).external == ALL, "no layers"


@pytest.mark.parametrize(
    "other",
    [
        {"drafts": 2, **ROOM, **MODELS["windows"]},
        {"speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1}},
    ],
    ids=["several groups", "method"],
)
def test_drafters_that_are_not_supported(sidecar: Sidecar, start: Start, other: dict[str, Any]) -> None:
    start(sidecar, **other).ask(PROMPT)
    assert sidecar.status()["blocks"]["ready"] == 0


def test_an_engine_whose_weights_may_be_replaced_while_it_runs(sidecar: Sidecar, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(scheduler.logger, "error", lambda text, *values: said.append(text % values))
    start(sidecar, weight_transfer_config={"backend": "nccl"}).ask(PROMPT)
    assert sidecar.status()["blocks"]["ready"] == 0
    assert "runs uncached: its weights may be replaced" in said[-1]
