from __future__ import annotations

from types import ModuleType

import pytest

from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.memory import CUDA_CONTEXT_BYTES, HOST_RESERVE_BYTES, ledger
from superoffload.plan import Plan


def items(account: object) -> dict[str, int]:
    return {i.name: i.bytes for i in account.items}  # type: ignore[attr-defined]


def test_every_byte_of_a_counted_plan(tiny: ModuleType) -> None:
    n = tiny.BUCKET_PARAMS
    account = ledger(tiny.profile(tiny.hardware(), layers=4), tiny.plan())
    assert items(account) == {
        "16-bit weights": 2 * 4 * n,
        "gradient ring": 4 * 2 * n,
        "gradient being produced": 2 * n,
        "activations": 4 * 5000,
        "CUDA context and allocator": CUDA_CONTEXT_BYTES,
        "held gradients": 2 * 4 * n,
        "upload copy of new weights": 2 * 4 * n,
        "master weights and moments": 12 * 4 * n,
        "system and Python": HOST_RESERVE_BYTES,
    }
    assert account.total("pinned") == 16 * n
    assert account.total("host") == 64 * n + HOST_RESERVE_BYTES
    assert account.fits


def test_a_retained_bucket_moves_sixteen_bytes_per_parameter_from_host_to_gpu(tiny: ModuleType) -> None:
    n = tiny.BUCKET_PARAMS
    profile = tiny.profile(tiny.hardware(), layers=8)
    none, two = ledger(profile, tiny.plan()), ledger(profile, tiny.plan(retained_buckets=2))
    assert two.total("gpu") - none.total("gpu") == 2 * 14 * n
    assert none.total("host") - two.total("host") == 2 * 16 * n


@pytest.mark.parametrize(
    ("fields", "gpu", "host", "pinned"),
    [
        ({"cast_down": "gpu"}, 4 * 2, 2 * 8, 2 * 8),  # fp32 in the ring and held
        ({"cast_down": "cpu"}, 0, 4, 0),  # one bucket of fp32
        ({"cast_up": "gpu"}, 4, -2 * 8, 2 * 8),  # the master goes up: pinned, and no 16-bit copy
        ({"speculate": "on"}, 0, (3 + 10244 / 16384) * 8, 0),  # and an escape list for each tile
        ({"speculate": "auto"}, 0, (3 + 10244 / 16384) * 8, 0),
        ({"speculate": "on", "undo": "snapshot"}, 0, 12 * 8, 0),
        ({"accumulation": 2}, 2 * 8, 0, 0),
        ({"accumulation": 2, "accumulate_on": "cpu"}, 0, 0, 0),  # held gradients come up into the ring
        ({"flow_blocks": (1, 2, 3)}, -2 * 3 + 2 * 2, 0, 0),  # two slots
        ({"flow_blocks": (1, 2, 3), "prefetch_blocks": 9}, 0, 0, 0),  # no more slots than blocks
        ({"flow_blocks": (1,), "cast_up": "gpu"}, 4 - 2 + 2, -2 * 7, 4 * 8 - 2 * 7),  # its 16-bit copy stays: the home
    ],
)
def test_what_a_knob_adds_per_parameter_of_a_bucket(
    tiny: ModuleType, fields: dict[str, object], gpu: int, host: float, pinned: int
) -> None:
    profile = tiny.profile(tiny.hardware(), layers=8)
    before, after = ledger(profile, tiny.plan()), ledger(profile, tiny.plan(**fields))
    n = tiny.BUCKET_PARAMS
    assert after.total("gpu") - before.total("gpu") == gpu * n
    assert after.total("host") - before.total("host") == host * n
    assert after.total("pinned") - before.total("pinned") == pinned * n


def test_recomputation_keeps_inputs_and_one_layer(tiny: ModuleType) -> None:
    account = items(ledger(tiny.profile(tiny.hardware(), layers=4), tiny.plan(activations="full")))
    assert account["layer inputs kept for recomputation"] == 4 * 1000
    assert account["recomputed layer, logits and loss"] == 4000


MIB = 2**20


def policy_items(tiny: ModuleType, **fields: object) -> dict[str, int]:
    """Ledger of four layers with inputs of 2 MiB and activations of 10, of which selective keeps 5. Compiled they keep
    7."""
    profile = tiny.profile(tiny.hardware(), layers=4)
    sizes = {"input_bytes": 2 * MIB, "activation_bytes": 10 * MIB, "selective_bytes": 5 * MIB,
             "selective_recompute_s": 0.25, "compiled_bytes": 7 * MIB, "compiled_forward_s": 0.5,
             "compiled_backward_s": 1.5}  # fmt: skip
    blocks = tuple(b.model_copy(update=sizes) for b in profile.blocks)
    return items(ledger(profile.replace(blocks=blocks), tiny.plan(**fields)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"activations": "none"}, {"activations": 40}),
        ({"activations": "selective"}, {
            "results kept by selective recomputation": 20, "recomputed layer, logits and loss": 5}),
        ({"activations": "full"}, {
            "layer inputs kept for recomputation": 8, "recomputed layer, logits and loss": 8}),
        ({"activations": "offload_inputs"}, {
            "offloaded layer inputs": 8, "offloaded tensors in flight": 4, "recomputed layer, logits and loss": 8}),
        ({"activations": "offload_saved"}, {"offloaded activations": 40, "offloaded tensors in flight": 20}),
        ({"activations": "none", "activations_by_block": {0: "offload_inputs", 3: "full"}}, {
            "activations": 20, "layer inputs kept for recomputation": 2, "offloaded layer inputs": 2,
            "offloaded tensors in flight": 4, "recomputed layer, logits and loss": 8}),
        ({"activations": "none", "compile_blocks": True}, {"activations": 28}),
        ({"activations": "full", "compile_blocks": True}, {
            "layer inputs kept for recomputation": 8, "recomputed layer, logits and loss": 5}),
        ({"activations": "offload_inputs", "compile_blocks": True}, {
            "offloaded layer inputs": 8, "offloaded tensors in flight": 4, "recomputed layer, logits and loss": 5}),
        ({"activations": "offload_saved", "compile_blocks": True}, {
            "offloaded activations": 28, "offloaded tensors in flight": 14}),
    ],
)  # fmt: skip
def test_what_each_policy_keeps_and_where(
    tiny: ModuleType, fields: dict[str, object], expected: dict[str, int]
) -> None:
    words = ("activations", "layer", "results", "offloaded", "recomputed")
    found = {k: v / MIB for k, v in policy_items(tiny, **fields).items() if k.startswith(words)}
    assert found == expected


def test_the_gradients_of_a_compiled_layer_exist_at_once() -> None:
    profile = estimate("llama-7b", micro_batch=1, seq_len=512, hardware="gh200")
    plan = Plan(micro_batch=1, seq_len=512, activations="none")
    eager, compiled = (items(ledger(profile, plan.replace(compile_blocks=c))) for c in (False, True))
    embedding, layer = profile.blocks[0], profile.blocks[1]
    assert eager["gradient being produced"] == 2 * embedding.params
    assert compiled["gradient being produced"] == 2 * max(layer.params, embedding.params) == 2 * layer.params


def test_small_inputs_are_not_worth_a_copy(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(), layers=4)  # 1,000 bytes
    full, inputs = (ledger(profile, tiny.plan(activations=a)) for a in ("full", "offload_inputs"))
    assert items(inputs) == items(full)


def test_overrides_for_blocks_that_are_no_layers_are_refused() -> None:
    profile = estimate("smollm2-135m", micro_batch=1, seq_len=128, hardware="gh200")
    with pytest.raises(InputError, match=r"activations_by_block names block 0\. Expected layers, blocks 1 to 30"):
        ledger(profile, Plan(micro_batch=1, seq_len=128, activations_by_block={0: "full"}))


def test_the_peaks_measured_on_an_h200() -> None:
    # Forward and backward alone with full recomputation at 32,768 tokens peak at 25.0 GB, when the loss is computed:
    # weights, kept inputs and logits (no gradient exists yet).
    profile = estimate("bench-3b", micro_batch=16, seq_len=2048, hardware="h200-pcie5")
    account = items(ledger(profile, Plan(micro_batch=16, seq_len=2048)))
    names = ("16-bit weights", "layer inputs kept for recomputation", "recomputed layer, logits and loss")
    assert sum(account[n] for n in names) / 1e9 == pytest.approx(25.0, rel=0.05)


def test_shared_memory_counts_everything_once() -> None:
    profile = estimate("smollm2-135m", micro_batch=1, seq_len=256, hardware="laptop", dtype="float32")
    account = ledger(profile, Plan(micro_batch=1, seq_len=256, bucket_mb=32))
    assert account.total("gpu") == account.gpu_capacity_bytes == 0
    assert account.host_capacity_bytes == 16_000_000_000
    assert items(account)["float32 weights"] == pytest.approx(4 * profile.params, rel=0.001)  # and their padding
    # float32: the master itself goes up the link, so it is pinned and has no 16-bit copy
    assert items(account)["pinned master weights"] == pytest.approx(4 * profile.params, rel=0.001)
    assert items(account)["moments"] == pytest.approx(8 * profile.params, rel=0.001)


def test_overflow_and_largest(tiny: ModuleType) -> None:
    profile = tiny.profile(tiny.hardware(gpu_gb=0.5, host_gb=4.05), layers=4)
    account = ledger(profile, tiny.plan())
    assert not account.fits
    assert set(account.overflow()) == {"gpu", "host"}
    assert account.largest("gpu").name == "CUDA context and allocator"  # type: ignore[union-attr]
    assert account.largest("pinned").name == "held gradients"  # type: ignore[union-attr]


def test_a_loss_in_chunks_takes_its_share_of_the_logits() -> None:
    """Llama-3-8B at 8,192 tokens: 13.7 GB with the model's own loss."""
    profile = estimate("llama-3-8b", micro_batch=1, seq_len=8192, hardware="h200-pcie5")
    logits, row = 8192 * 128256, 8192 * 4096 * 2
    assert profile.blocks[-1].logits == logits

    def extra(chunks: int, activations: str = "none") -> int:
        plan = Plan(micro_batch=1, seq_len=8192, loss_chunks=chunks, activations=activations)
        return items(ledger(profile, plan))["recomputed layer, logits and loss"]

    assert extra(1) == 13 * logits
    assert extra(8) == 8 * logits // 8 + row
    layer = profile.blocks[1]
    made = layer.activation_bytes - layer.input_bytes + layer.working_bytes
    assert extra(16, "full") == made - 4 * row, "a layer takes more"
