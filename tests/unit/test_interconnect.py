"""What joins several Superchips, what collectives between them cost, and the estimate of one of them."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest

from superoffload import hardware
from superoffload.collectives import all_to_all_seconds, ring_seconds
from superoffload.errors import InputError
from superoffload.estimating import estimate
from superoffload.hardware import Curve, Hardware, Interconnect, Wire
from superoffload.interconnect_presets import CHIPS, FAMILIES
from superoffload.profile_scaling import rescale, retarget
from superoffload.profiler import Profile

NEAR = 1e-3


def board(gb_per_s: float, *, all_to_all: float | None = None, latency_s: float = 0.0, mesh: bool = False) -> Wire:
    ring, other = (Curve(size_mb=(1.0,), gb_per_s=(rate,)) for rate in (gb_per_s, all_to_all or gb_per_s))
    return Wire(ring=ring, all_to_all=other, latency_s=latency_s, mesh=mesh)


# -- what is known of interconnects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "chips"), list(itertools.product(FAMILIES, CHIPS)))
def test_every_number_of_an_interconnect_has_a_source(name: str, chips: int) -> None:
    one, several = hardware.preset(name), hardware.preset(f"{name}-x{chips}")
    net = several.interconnect
    assert net is not None
    assert net.chips == chips
    assert several == hardware.joined(one, chips)
    assert several.replace(name=name, interconnect=None, sources=one.sources) == one, "one of its chips is that chip"
    numbers = {
        f"interconnect.{level}.{field}"
        for level in ("board", "network")
        if getattr(net, level) is not None
        for field in ("ring", "all_to_all", "latency_s")
    }
    assert numbers
    assert set(several.sources) == set(one.sources) | numbers
    assert {several.sources[n].split(":")[0] for n in numbers} <= {"published", "reported", "assumed"}
    assert Hardware.from_json(several.to_json()) == several


def test_names_of_several_chips_are_exact() -> None:
    assert hardware.is_preset("gh200-quad-x8")
    for name in ("gh200-quad-x3", "gh200-x1", "gh200-quad-x08", "h200-pcie5-x2", "-x2", "gh200-quadx8"):
        assert not hardware.is_preset(name), name
        with pytest.raises(InputError, match="unknown hardware preset"):
            hardware.preset(name)
    with pytest.raises(InputError, match=r'nothing is known of how several "laptop" are joined.*gh200-quad'):
        hardware.joined(hardware.preset("laptop"), 2)
    with pytest.raises(InputError, match=r"chips = 3. Expected 1, 2, 4, 8, 16"):
        hardware.joined(hardware.preset("gh200"), 3)


def test_two_chips_of_a_board_of_four_have_a_third_of_its_links() -> None:
    two, four = (hardware.preset(f"gh200-quad-x{n}").interconnect for n in (2, 4))
    assert two is not None
    assert four is not None
    assert ring_seconds(two, 2, 1e9) == pytest.approx(ring_seconds(four, 2, 1e9), rel=NEAR)
    assert two.board is not None
    assert four.board is not None
    assert two.board.ring.peak == pytest.approx(four.board.ring.peak / 3, rel=NEAR)


def test_a_board_needs_several_chips_and_a_network_several_boards() -> None:
    for wrong in (
        {"chips": 6, "board_chips": 4, "board": board(1.0), "network": board(1.0)},
        {"chips": 2, "board_chips": 1, "board": board(1.0), "network": board(1.0)},
        {"chips": 4, "board_chips": 2, "board": board(1.0)},
        {"chips": 2, "board_chips": 2, "board": board(1.0), "network": board(1.0)},
    ):
        with pytest.raises(ValueError, match="board"):
            Interconnect(**wrong)  # type: ignore[arg-type]


# -- collectives -------------------------------------------------------------------------------------------------------


def test_collectives_on_one_board() -> None:
    # 4 chips, 12 GB: each sends 9 GB of a ring's, at 3 GB/s 3 s; two more chips than a pair, 0.25 s each.
    net = Interconnect(chips=4, board_chips=4, board=board(3.0, all_to_all=4.5, latency_s=0.25))
    assert ring_seconds(net, 4, 12e9) == pytest.approx(3.5)
    assert all_to_all_seconds(net, 4, 12e9) == pytest.approx(2.5)
    assert ring_seconds(net, 2, 12e9) == pytest.approx(2.0)
    assert ring_seconds(net, 1, 12e9) == ring_seconds(net, 4, 0) == all_to_all_seconds(net, 1, 1) == 0.0
    # Without a switch two of four reach each other by a third of their links.
    mesh = net.replace(board=board(3.0, all_to_all=4.5, mesh=True))
    assert ring_seconds(mesh, 2, 12e9) == pytest.approx(6.0)
    assert ring_seconds(mesh, 4, 12e9) == pytest.approx(3.0)


def test_collectives_over_the_network() -> None:
    # Two boards of two. The ring: 6 of 8 GB, over both adapters of a board 2 x 1 GB/s. An all-to-all: 4 of 8 GB stay
    # off the board, over each chip's own adapter.
    net = Interconnect(chips=4, board_chips=2, board=board(100.0), network=board(1.0, latency_s=0.5))
    assert ring_seconds(net, 4, 8e9) == pytest.approx(3.0 + 2 * 0.5)
    assert all_to_all_seconds(net, 4, 8e9) == pytest.approx(4.0 + 2 * 0.5)
    slow_board = net.replace(board=board(0.1))
    assert ring_seconds(slow_board, 4, 8e9) == pytest.approx(60.0 + 1.0)
    assert all_to_all_seconds(slow_board, 4, 8e9) == pytest.approx(20.0 + 1.0), "2 of 8 GB within the board"
    alone = Interconnect(chips=2, board_chips=1, network=board(2.0))
    assert ring_seconds(alone, 2, 8e9) == all_to_all_seconds(alone, 2, 8e9) == pytest.approx(2.0)


def test_fewer_bytes_never_take_longer_in_a_collective() -> None:
    for name in FAMILIES:
        net = hardware.preset(f"{name}-x8").interconnect
        assert net is not None
        for n, seconds in itertools.product((2, 4, 8), (ring_seconds, all_to_all_seconds)):
            times = [seconds(net, n, 1.05**k * 1e4) for k in range(300)]
            assert times == sorted(times), (name, n, seconds)


# -- the estimate of one of several ------------------------------------------------------------------------------------


def test_a_chip_has_its_share_of_the_work_and_of_the_memory() -> None:
    whole = estimate("paper-13b", micro_batch=1, seq_len=262144, hardware="gh200")
    part = estimate("paper-13b", micro_batch=1, seq_len=262144, hardware="gh200", sequence_parallel=8)
    assert part.sequence_parallel == 8
    assert part.tokens * 8 == whole.tokens
    assert part.model_flops * 8 == pytest.approx(whole.model_flops)
    assert part.params == whole.params
    for a, b in zip(whole.blocks, part.blocks, strict=True):
        assert b.forward_flops * 8 == pytest.approx(a.forward_flops), "attention: all tokens of an eighth of the heads"
        assert b.forward_s * 8 == pytest.approx(a.forward_s, rel=0.01)
        assert b.input_bytes * 8 == a.input_bytes
        assert (b.exchange is not None) == (b.kind == "layer")
    layer, own = whole.blocks[1], part.blocks[1]
    # Attention's result is kept twice: by heads, and by tokens for its way out (4,096 values of 2 bytes a token).
    assert own.activation_bytes * 8 == layer.activation_bytes + 262144 * 4096 * 2
    assert own.exchange is not None
    assert own.exchange.before_bytes == 3 * own.exchange.after_bytes == 3 * 4096 * 2 * 262144 // 8
    before, after = own.exchange.forward
    attention = 4 * 4096 * 262144 / 2 * 262144 / 8 / own.forward_flops
    assert after - before == pytest.approx(attention, rel=0.1), "most of a long sequence's forward is attention"
    assert 0 < own.exchange.backward[0] < own.exchange.backward[1] < 1


def test_keys_of_fewer_heads_than_chips_are_repeated() -> None:
    # Llama-3-8B: 32 heads of queries, 8 of keys and of values. With 16 chips each key head is on two of them.
    sizes = {}
    for n in (8, 16):
        layer = estimate("llama-3-8b", micro_batch=1, seq_len=16384, hardware="gh200", sequence_parallel=n).blocks[1]
        assert layer.exchange is not None
        sizes[n] = n * layer.exchange.before_bytes // (2 * 16384)
    assert sizes == {8: 4096 + 2 * 1024, 16: 4096 + 2 * 2048}


def test_what_cannot_be_divided_is_refused() -> None:
    def of(model: str, seq_len: int, n: int) -> Profile:
        return estimate(model, micro_batch=1, seq_len=seq_len, hardware="gh200", sequence_parallel=n)

    with pytest.raises(InputError, match=r"seq_len = 2049 with sequence_parallel = 2. Expected a multiple of 2"):
        of("llama-7b", 2049, 2)
    with pytest.raises(InputError, match=r"smollm2-135m has 9 attention heads, 3 of keys .*Expected one of 1, 3, 9"):
        of("smollm2-135m", 2048, 2)
    with pytest.raises(InputError, match="sequence_parallel = 0"):
        of("llama-7b", 2048, 0)


def test_only_an_estimate_can_be_divided(tiny: ModuleType) -> None:
    measured = tiny.profile(tiny.hardware()).replace(seq_len=2)
    with pytest.raises(InputError, match="does not say how attention is divided"):
        rescale(measured, sequence_parallel=2)
    part = estimate("paper-1b", micro_batch=2, seq_len=2048, hardware="gh200-quad-x4", sequence_parallel=4)
    assert rescale(part, micro_batch=1).sequence_parallel == 4
    assert retarget(part, "gh200-x8").sequence_parallel == 4
