"""Model start: weights go from a file, from chance or from the host straight to where they are trained."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file

from superoffload.engine import OffloadAdamW, RandomWeights, SafetensorsWeights
from superoffload.errors import InputError
from tests.engine.common import batches, digest, llama, train
from tests.engine.scenario import equal, weights

DATA = batches(4)
PLANS = [{}, {"flow_blocks": (1, 2, 3)}, {"flow_blocks": (2,), "retained_buckets": 9}, {"retained_buckets": 4}]


def empty(**kwargs):
    """The same model without values: parameters on the meta device."""
    with init_empty_weights():
        model = llama(torch.bfloat16, device=None, **kwargs)
    model.tie_weights()
    return model


def make(model, **kwargs):
    return OffloadAdamW(model, **{"lr": 1e-3, "max_grad_norm": 1.0, "bucket_mb": 0.04, "device": "cpu", **kwargs})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_a_checkpoint_is_the_model(tmp_path, plan, tied):
    if tied and plan.get("flow_blocks"):
        plan = {**plan, "flow_blocks": (2,)}
    real = llama(torch.bfloat16, tied=tied)
    real.save_pretrained(tmp_path)
    before = weights(real)
    with make(real, device=None) as opt:
        train(real, opt, DATA)
        expected = digest(real, opt)
    model = empty(tied=tied)
    same = {id(p): name for name, p in model.named_parameters()}
    with make(model, weights=SafetensorsWeights(tmp_path), **plan) as opt:
        assert equal(weights(model), before)
        assert {id(p): name for name, p in model.named_parameters()} == same, "the parameters are the same objects"
        train(model, opt, DATA)
        assert digest(model, opt) == expected
    assert not any(p.is_meta for p in model.parameters())


def test_shards_with_an_index_and_frozen_parameters(tmp_path):
    real = llama(torch.bfloat16)
    values = {k: v.clone() for k, v in real.state_dict().items()}
    names = sorted(values)
    for i in (0, 1):
        save_file({n: values[n] for n in names[i::2]}, tmp_path / f"part{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: f"part{i % 2}.safetensors" for i, n in enumerate(names)}})
    )
    (tmp_path / "other.safetensors").write_bytes(b"not one, and not named by the index")
    model = empty()
    for p in model.model.layers[1].parameters():
        p.requires_grad_(False)
    with make(model, weights=SafetensorsWeights(tmp_path), flow_blocks=(1, 3)) as opt:
        assert equal(weights(model), weights(real))
        train(model, opt, DATA[:2])
        opt.synchronize()
        frozen = model.model.layers[1].mlp.up_proj.weight
        assert torch.equal(frozen, real.model.layers[1].mlp.up_proj.weight)


def test_random_weights_depend_on_the_seed_and_the_name_alone():
    found = []
    for plan in PLANS:
        with make(empty(), weights=RandomWeights(std=0.1, seed=3), **plan) as opt:
            found.append(weights(opt.model))
    assert all(equal(found[0], other) for other in found[1:])
    up, down = (found[0][f"model.layers.0.mlp.{k}.weight"].float() for k in ("up_proj", "down_proj"))
    assert abs(float(up.std()) - 0.1) < 0.01 and abs(float(up.mean())) < 0.01
    assert not torch.equal(up.reshape(-1), down.reshape(-1))
    assert bool((found[0]["model.norm.weight"] == 1).all())
    with make(empty(), weights=RandomWeights(std=0.1, seed=4)) as opt:
        assert not equal(found[0], weights(opt.model))


def test_what_cannot_start_is_refused_before_anything_changes(tmp_path):
    with pytest.raises(InputError, match="parameters are on the meta device"):
        make(empty())
    real = llama(torch.bfloat16)
    values = dict(real.state_dict())
    del values["model.norm.weight"]
    save_file({k: v.clone() for k, v in values.items()}, tmp_path / "a.safetensors")
    model = empty()
    with pytest.raises(InputError, match=r"no weights for 1 of 30 parameters: model\.norm\.weight"):
        make(model, weights=SafetensorsWeights(tmp_path))
    assert all(p.is_meta for p in model.parameters())
    values["model.norm.weight"] = torch.zeros(3)
    save_file({k: v.clone() for k, v in values.items()}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \(3,\)\. Expected \(64,\)"):
        make(model, weights=SafetensorsWeights(tmp_path))
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"is in a\.safetensors and in b\.safetensors"):
        SafetensorsWeights(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"rubbish")
    with pytest.raises(InputError, match=r"c\.safetensors cannot be read"):
        SafetensorsWeights(tmp_path / "c.safetensors")
    with pytest.raises(InputError, match=r"holds no \.safetensors file"):
        SafetensorsWeights(tmp_path / "nowhere")
    with torch.device("meta"):
        hollow = llama(torch.bfloat16, device="meta")
    with pytest.raises(InputError, match=r"buffer .* is on the meta device"):
        make(hollow, weights=RandomWeights())
