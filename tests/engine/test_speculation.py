"""I1: a step that was speculated is bit for bit the step that waited, whatever its verdict and whatever the plan."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from superoffload.engine import OffloadAdamW
from tests.engine.common import batches, checkpointed, digest, llama
from tests.engine.scenario import KINDS, MODELS, Run, Step, play

_waited: dict[tuple, Run] = {}


def waited(name: str, steps: tuple[Step, ...], accumulation: int = 1) -> Run:
    """The run that waits for every norm, with one bucket and nothing else; it also sets the bounds."""
    key = (name, steps, accumulation)
    if key not in _waited:
        _waited[key] = play(MODELS[name](), steps, accumulation=accumulation, speculate="off")
    return _waited[key]


def same(name: str, steps: tuple[Step, ...], accumulation: int = 1, **kwargs) -> Run:
    """Play it again under a plan and with the bounds known beforehand; the bits must not change."""
    expected = waited(name, steps, accumulation)
    run = play(MODELS[name](), steps, bounds=expected.bounds, accumulation=accumulation, **kwargs)
    assert run.result == expected.result
    assert [r.verdict for r in run.ledger] == [r.verdict for r in expected.ledger]
    return run


EVERY_KIND = tuple(step for kind in KINDS for step in (KINDS["commit"], KINDS[kind]))


@pytest.mark.parametrize("undo", ["record", "snapshot"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_step(name, undo):
    """Ledger and bits of each kind, with a worker that has time to speculate on all that it may."""
    if name == "float16":  # a spike would overflow
        steps = tuple(s._replace(factor=min(s.factor, 8.0)) for s in EVERY_KIND)
    else:
        steps = EVERY_KIND
    run = same(name, steps, speculate="on", bucket_mb=0.05, lockstep=True, undo=undo)
    seen = dict(zip(KINDS, run.ledger[1::2], strict=True))
    with OffloadAdamW(MODELS[name](), bucket_mb=0.05) as probe:
        everything = len(probe.engine.arenas.buckets)
    assert everything > 10
    for kind, r in seen.items():
        assert 0 <= r.undone <= r.speculated <= everything
        if kind in ("commit", "no bound", "spike", "zero"):
            assert (r.verdict, r.speculated, r.undone) == ("commit", everything, 0)
        elif "clipped" in kind:
            assert (r.verdict, r.undone) == ("clip", r.speculated)
        else:
            assert (r.verdict, r.undone) == ("skip", r.speculated)
    assert run.ledger[0].speculated == 0, "the first step shows how often each gradient fires"
    assert seen["clipped at once"].speculated < 3
    assert seen["clipped at the end"].undone > everything / 2, "most of it was updated when clipping became certain"
    assert seen["nan first"].speculated < seen["inf"].undone < seen["nan last"].undone
    if undo == "snapshot":
        assert not any(r.waiting_tiles for r in run.ledger), "a snapshot can take back anything"
    elif name != "float16":
        assert seen["spike, clipped at the end"].waiting_tiles > 0, "no escape list was full"


BRANCHES = tuple(
    step
    for kind in ("spike", "clipped half-way", "spike, clipped at the end", "nan last", "clipped at the end")
    for step in (KINDS["commit"], KINDS[kind])
)


@pytest.mark.parametrize("down", ["gpu", "cpu", "fused"])
@pytest.mark.parametrize("up", ["gpu", "cpu", "fused"])
@pytest.mark.parametrize("retained", [0, 4])
def test_a_snapshot_is_the_record_under_every_cast(down, up, retained):
    """Both take ahead all that commits and take back all that does not; only a record leaves tiles waiting. How many
    buckets clipping stops is a race in either: a gradient that spans some may arrive piece by piece."""
    plan = {"bucket_mb": 0.05, "cast_down": down, "cast_up": up, "retained_buckets": retained}
    runs = {u: same("mixed", BRANCHES, speculate="on", lockstep=True, undo=u, **plan) for u in ("record", "snapshot")}
    record, snapshot = runs["record"].ledger, runs["snapshot"].ledger
    for a, b in zip(record[1:], snapshot[1:], strict=True):
        if a.verdict == "commit":
            assert (b.speculated, b.undone) == (a.speculated, a.undone) == (snapshot[1].speculated, 0)
        else:
            assert a.undone == a.speculated > 0 and b.undone == b.speculated > 0
    assert {r.verdict for r in snapshot if r.undone} == {"clip", "skip"}
    assert record[1].speculated and record[1].waiting_tiles > 0, "the spike that commits filled no escape list"
    assert not any(r.waiting_tiles for r in snapshot)


FOUND: Counter[str] = Counter()


@given(
    name=st.sampled_from(["float32", "bfloat16", "mixed"]),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=5),
    speculate=st.sampled_from(["on", "on", "on", "auto"]),
    bucket_mb=st.sampled_from([0.04, 0.07, 0.3, 64]),
    retained=st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0]),
    down=st.sampled_from(["gpu", "cpu", "fused"]),
    up=st.sampled_from(["gpu", "cpu", "fused"]),
    threads=st.integers(1, 3),
    accumulation=st.sampled_from([1, 1, 2]),
    hint=st.sampled_from(["no_sync", "counter", "none"]),
    on=st.sampled_from(["gpu", "cpu"]),
    undo=st.sampled_from(["record", "record", "snapshot"]),
    flow=st.sampled_from([(), (), (1,), (1, 2), (0, 1, 2, 3)]),
    prefetch=st.integers(1, 3),
    master=st.sampled_from(["plain", "split"]),
    undo_buckets=st.sampled_from([None, None, 1, 3]),
    delay_us=st.sampled_from([0, 0, 200, 1000]),
    sleeps=st.sampled_from([0, 1, 2]),
)
def any_pattern(
    name, kinds, speculate, bucket_mb, retained, down, up, threads, accumulation, hint, on, undo, flow, prefetch,
    master, undo_buckets, delay_us, sleeps
):  # fmt: skip
    with OffloadAdamW(MODELS[name](), bucket_mb=bucket_mb, flow_blocks=flow) as probe:
        count = len(probe.engine.arenas.buckets)
    steps = (KINDS["commit"], *(KINDS[k] for k in kinds), KINDS["commit"])
    run = same(
        name, steps, accumulation, hint=hint, delay_us=delay_us, sleeps=sleeps, speculate=speculate,
        bucket_mb=bucket_mb, retained_buckets=round(retained * count), cast_down=down,
        cast_up="fused" if master == "split" else up, adam_threads=threads, accumulate_on=on, undo=undo,
        flow_blocks=flow, prefetch_blocks=prefetch, master=master, undo_buckets=undo_buckets,
    )  # fmt: skip
    for r in run.ledger:
        FOUND[r.verdict + (" undone" if r.undone else " kept" if r.speculated else " waited")] += 1
        FOUND["waiting tiles"] += r.waiting_tiles
        assert undo_buckets is None or r.speculated <= undo_buckets
        FOUND["undone of few"] += r.undone if undo_buckets else 0
        FOUND["in part"] += 0 < r.speculated < count
        FOUND["flow undone"] += r.undone if flow else 0
        FOUND["split undone"] += r.undone if master == "split" and name != "float32" else 0


@pytest.mark.filterwarnings("ignore:a second backward ran")
def test_any_pattern_under_any_plan():
    settings(max_examples=40, deadline=None, derandomize=True)(any_pattern)()
    for what in ("commit kept", "clip undone", "skip undone", "clip waited", "skip waited", "waiting tiles", "in part",
                 "flow undone", "split undone", "undone of few"):  # fmt: skip
        assert FOUND[what], f"no example had: {what}"


@pytest.mark.parametrize("undo", ["record", "snapshot"])
@pytest.mark.parametrize("few", [1, 4])
def test_only_the_first_buckets_have_undo_memory(few, undo):
    """They are the only ones taken before the verdict, all of them; and the bits are the same."""
    run = same("bfloat16", EVERY_KIND, speculate="on", bucket_mb=0.05, lockstep=True, undo=undo, undo_buckets=few)
    commits = [r for r in run.ledger[1:] if r.verdict == "commit"]
    assert {r.speculated for r in commits} == {few}
    assert {r.undone for r in run.ledger if r.verdict != "commit"} - {0}, "nothing was taken back"
    with OffloadAdamW(MODELS["bfloat16"](), bucket_mb=0.05, speculate="on", undo=undo, undo_buckets=few) as opt:
        assert [b.undo is not None for b in opt.engine.arenas.buckets[: few + 1]] == [True] * few + [False]


@pytest.mark.parametrize("retained", [3, 9])
def test_clipping_that_only_retained_buckets_show(retained):
    """Their gradients come last and never reach the worker: all it has speculated is taken back at the verdict."""
    steps = (KINDS["commit"], Step(bound=0.9), Step(bound=0.9999), KINDS["nan last"], KINDS["commit"])
    run = same("bfloat16", steps, speculate="on", bucket_mb=0.05, retained_buckets=retained, lockstep=True)
    with OffloadAdamW(MODELS["bfloat16"](), bucket_mb=0.05, retained_buckets=retained) as probe:
        mine = len(probe.engine.arenas.cpu_buckets)
    assert [r.speculated for r in run.ledger[2:]] == [mine, mine, mine]
    assert [r.undone for r in run.ledger[2:]] == [mine, mine, 0]


def test_auto_is_on_and_off():
    steps = (KINDS["commit"],) * 5 + (Step(bound=0.9),) + (KINDS["commit"],) * 2
    run = same("float32", steps, speculate="auto", bucket_mb=0.05, lockstep=True)
    assert [r.speculated > 0 for r in run.ledger] == [False] * 3 + [True] * 5
    assert run.ledger[5].undone


class Wide(nn.Module):
    """A weight that spans buckets, one that shares its bucket, and a bias of three elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(96, 512), nn.Linear(512, 96), nn.Linear(96, 3)])
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        x = torch.nn.functional.one_hot(input_ids % 96, 96).to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return type("Out", (), {"loss": (x.float() - labels[..., None] / 384).square().mean() * 10})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_mb", [0.04, 64])
def test_a_weight_larger_than_a_bucket(dtype, bucket_mb, monkeypatch):
    monkeypatch.setitem(MODELS, "wide " + dtype, lambda: Wide(getattr(torch, dtype)))
    run = same("wide " + dtype, EVERY_KIND, speculate="on", bucket_mb=bucket_mb, lockstep=True)
    assert max(r.speculated for r in run.ledger) == (1 if bucket_mb == 64 else 14)
    assert run.ledger[-1].undone == run.ledger[-1].speculated


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile asks for it
@pytest.mark.parametrize("how", ["tied", "checkpointed", "reentrant", "compiled", "float16"])
def test_other_models(how, monkeypatch):
    def model():
        if how == "compiled":
            m = llama(layers=2)
            for layer in m.model.layers:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
            return m
        if how == "float16":
            return llama(torch.float16, layers=2)
        m = llama(torch.bfloat16, layers=2, tied=how == "tied")
        return m if how == "tied" else checkpointed(m, how == "reentrant")

    monkeypatch.setitem(MODELS, how, model)
    steps = (KINDS["commit"], KINDS["commit"], Step(bound=0.9999), KINDS["nan last"], KINDS["commit"])
    run = same(how, steps, speculate="on", bucket_mb=0.05, lockstep=True)
    assert run.ledger[1].speculated and run.ledger[2].undone and run.ledger[4].speculated


def test_nothing_grows_after_the_second_step():
    engines = []

    def sizes(i: int, opt: OffloadAdamW) -> None:
        opt.synchronize()
        host = opt.engine.arenas.host
        engines.append((host.pinned_bytes, host.pageable_bytes, opt.engine.collector.device_bytes, _resident_kb()))

    steps = (KINDS["commit"], KINDS["clipped at the end"]) * 20
    same("float32", steps, speculate="on", bucket_mb=0.05, after_step=sizes)
    assert len({e[:3] for e in engines[1:]}) == 1
    assert engines[-1][3] - engines[10][3] < 4096, "resident memory grows"


def _resident_kb() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_step_with_a_bad_gradient_never_was(dtype, bad):
    """Moments, counts and weights are those of a run without the step, and finite."""
    results = []
    for with_it in (False, True):
        model = llama(dtype, layers=2)
        with OffloadAdamW(model, lr=1e-3, speculate="on", bucket_mb=0.05, retained_buckets=2) as opt:
            for i, x in enumerate(batches(5)):
                if i == 3 and not with_it:
                    continue
                if i == 3:
                    handle = model.model.embed_tokens.weight.register_hook(lambda g: g * bad)
                    # In lockstep, so that the buckets before the bad one have been speculated for certain.
                    slow = [p.register_hook(lambda g: opt.engine.worker.wait_idle()) for p in model.parameters()]
                model(input_ids=x, labels=x).loss.backward()
                opt.engine.worker.wait_idle()
                opt.step()
                opt.zero_grad()
                if i == 3:
                    for hook in (handle, *slow):
                        hook.remove()
                    undone = opt.stats.verdict
                for p in opt.engine.params:
                    opt.synchronize()
                    for kind in ("master", "exp_avg", "exp_avg_sq"):
                        assert torch.isfinite(opt.engine.weights.gather(p, kind)).all(), (i, p.name, kind)
            results.append(digest(model, opt))
            if with_it:
                assert undone == "skip" and opt.ledger[3].undone > 0
    assert results[0] == results[1]
