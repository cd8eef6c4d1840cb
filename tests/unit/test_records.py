"""Records: exact JSON in and out, closed to unknown keys, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superoffload.errors import InputError
from superoffload.hardware import Curve, Hardware, preset
from superoffload.memory import Ledger, LedgerItem
from superoffload.plan import ACTIVATIONS, CASTS, Plan
from superoffload.profiler import BlockProfile, Profile
from superoffload.record import write_atomic
from superoffload.tracing import Stall, Trace, TraceEvent


def a_profile(**changes: Any) -> Profile:
    layer = BlockProfile(
        name="layer", kind="layer", tensor_numels=(16, 5), forward_s=1 / 3, backward_s=0.1 + 0.2, forward_flops=1e9,
        input_bytes=64, activation_bytes=640,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "source": "modelled", "model": "toy", "model_fingerprint": "f" * 64, "micro_batch": 2, "seq_len": 8,
        "blocks": (layer, layer.replace(name="head", kind="head")), "model_flops": 6e9, "hardware": preset("gh200"),
        "context": {"größe": "µ"},
    }  # fmt: skip
    return Profile(**{**fields, **changes})


def a_trace(**changes: Any) -> Trace:
    fields: dict[str, Any] = {
        "source": "modelled", "step_s": 2.0, "tokens_per_step": 8000, "model_flops_per_step": 8e14,
        "peak_bf16_tflops": 800.0, "hardware": "gh200", "model": "toy", "plan": Plan(flow_blocks=(1, 3)),
        "memory": Ledger(items=(LedgerItem("gpu", "weights", 5), LedgerItem("pinned", "gradients", 7),
                                LedgerItem("host", "moments", 11)), gpu_capacity_bytes=4, host_capacity_bytes=100),
        "events": (TraceEvent("gpu", "forward", "a", 0.0, 1.0), TraceEvent("gpu", "backward", "b", 0.5, 1.0),
                   TraceEvent("link_down", "copy_down", "c", 1.0, 0.5, bytes=10, bucket=0)),
        "stalls": (Stall("gpu", 1.5, 0.5, "Adam of bucket 0", "GPU waits 500 ms for Adam of bucket 0."),),
        "window_s": 2.0,
    }  # fmt: skip
    return Trace(**{**fields, **changes})


@pytest.mark.parametrize("record", [preset("gh200"), a_profile(), a_trace(), Plan(), a_trace().memory])
def test_json_round_trip_is_exact(record: Any, tmp_path: Path) -> None:
    assert type(record).from_json(record.to_json()) == record
    assert type(record).load(record.save(tmp_path / "r.json")) == record
    assert type(record).from_json(record.to_json(indent=None)).to_json() == record.to_json()


@given(
    st.builds(
        Plan,
        bucket_mb=st.floats(min_value=1e-6, max_value=65536, exclude_min=True),
        retained_buckets=st.integers(0, 10**6),
        flow_blocks=st.lists(st.integers(0, 200), unique=True).map(tuple),
        cast_down=st.sampled_from(CASTS),
        cast_up=st.sampled_from(CASTS),
        speculate=st.sampled_from(("on", "off", "auto")),
        undo=st.sampled_from(("record", "snapshot")),
        accumulate_on=st.sampled_from(("gpu", "cpu")),
        adam_threads=st.integers(1, 512),
        activations=st.sampled_from(ACTIVATIONS),
        activations_by_block=st.dictionaries(st.integers(0, 200), st.sampled_from(ACTIVATIONS), max_size=3),
        loss_chunks=st.integers(1, 1000),
        micro_batch=st.integers(1, 1000),
        seq_len=st.integers(1, 10**6),
        accumulation=st.integers(1, 64),
        reasons=st.dictionaries(st.text(), st.text(), max_size=3),
    )
)
def test_any_plan_survives_json_bit_for_bit(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_a_profile_from_before_a_field_is_read() -> None:
    profile = a_profile()
    body = json.loads(profile.to_json())
    for block in body["blocks"]:
        for name in ("logits", "chunked_activation_bytes", "chunked_working_bytes"):
            block.pop(name, None)
    old = Profile.from_json(json.dumps(body))
    assert all(b.logits is None for b in old.blocks)
    body["blocks"][-1]["logits"] = 7
    with pytest.raises(InputError, match="belong together"):
        Profile.from_json(json.dumps(body))


def test_a_file_names_its_kind_and_another_kind_is_refused(tmp_path: Path) -> None:
    path = a_profile().save(tmp_path / "profile.json")
    assert json.loads(path.read_text())["schema"] == "superoffload.profile"
    with pytest.raises(InputError, match=r'profile\.json holds a "superoffload\.profile".*"superoffload\.plan"'):
        Plan.load(path)


def test_a_newer_schema_is_refused() -> None:
    body = json.loads(Plan().to_json())
    with pytest.raises(InputError, match=r"schema_version 2.*Expected 1"):
        Plan.from_json(json.dumps({**body, "schema_version": 2}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bucket_mbb": 3}, ['unknown key "bucket_mbb"', 'did you mean "bucket_mb"']),
        ({"bucket_mb": -64}, ["bucket_mb = -64", "greater than 0"]),
        ({"bucket_mb": math.nan}, ["bucket_mb = nan"]),
        ({"retained_buckets": 1.5}, ["retained_buckets = 1.5"]),
        ({"cast_down": "fuse"}, ["cast_down = 'fuse'", "'gpu', 'cpu' or 'fused'"]),
        ({"adam_threads": 0, "seq_len": 0}, ["adam_threads = 0", "seq_len = 0"]),
    ],
)
def test_bad_fields_are_named_with_value_and_expectation(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as e:
        Plan.from_dict(changes)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_unknown_key_of_a_nested_record_gets_its_own_suggestion() -> None:
    body = json.loads(preset("gh200").to_json())
    body["gpu"]["memory_bg"] = body["gpu"].pop("memory_gb")
    with pytest.raises(InputError, match=r'unknown key "gpu\.memory_bg"; did you mean "memory_gb"'):
        Hardware.from_json(json.dumps(body))


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ("[1]", "holds a JSON list"), ("3", "a JSON int")])
def test_foreign_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Plan.load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file: .*nothing\.json"):
        Plan.load(tmp_path / "nothing.json")


def test_records_are_frozen_and_replace_validates() -> None:
    plan = Plan()
    with pytest.raises(ValueError, match="frozen"):
        plan.bucket_mb = 3  # type: ignore[misc]
    assert plan.replace(bucket_mb=3).bucket_mb == 3
    with pytest.raises(InputError, match="bucket_mb"):
        plan.replace(bucket_mb=0)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "a.json", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert write_atomic(tmp_path / "a.json", "x").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_curve_interpolates_in_log_size_and_is_flat_outside() -> None:
    curve = Curve(size_mb=(1.0, 4.0, 16.0), gb_per_s=(10.0, 20.0, 40.0))
    assert [curve.at(x) for x in (0, 1e5, 1e6, 4e6, 16e6, 1e12)] == [10, 10, 10, 20, 40, 40]
    assert curve.at(2e6) == pytest.approx(15.0)
    with pytest.raises(ValueError, match="ascending"):
        Curve(size_mb=(4.0, 1.0), gb_per_s=(1.0, 2.0))


def test_trace_numbers_are_hand_countable() -> None:
    trace = a_trace()
    assert trace.busy_s("gpu") == 1.5  # two spans that overlap by half a second
    assert trace.busy_s("link_down") == 0.5
    assert trace.busy_s("cpu_adam") == 0
    assert trace.gpu_busy == 0.75
    assert a_trace(step_s=1.0).gpu_busy == 1.0  # what lies after one step belongs to the next
    assert (trace.tokens_per_s, trace.model_tflops, trace.mfu) == (4000.0, 400.0, 0.5)
    assert a_trace(peak_bf16_tflops=0.0).mfu == 0


def test_ledger_counts_pinned_as_host_and_names_what_overflows() -> None:
    ledger = a_trace().memory
    assert (ledger.total("gpu"), ledger.total("host"), ledger.total("pinned")) == (5, 18, 7)
    assert ledger.overflow() == {"gpu": 1}
    assert not ledger.fits
    largest = ledger.largest("host")
    assert largest is not None
    assert largest.name == "moments"
    assert Ledger(items=ledger.items).fits  # unknown capacity refuses nothing


def test_summary_has_the_promised_keys() -> None:
    summary = a_trace().summary()
    promised = {"step_s", "tokens_per_s", "model_tflops", "mfu", "gpu_busy", "stalls", "memory", "plan", "reasons"}
    assert promised <= set(summary)
    assert {"gpu_gb", "host_gb", "pinned_gb"} <= set(summary["memory"])
    json.dumps(summary, allow_nan=False)
