from strata_coord.stage_worker.residency import Residency
from strata_coord.stage_worker.uploads import routed_only_order, stream_all_order


def residency(resident: set[tuple[int, int]], arena: set[tuple[int, int]] = frozenset()) -> Residency:
    return Residency(
        cache_offsets=dict.fromkeys(resident, 0),
        arena_offsets=dict.fromkeys(arena, 0),
        cache_bytes=0,
        arena_bytes=0,
    )


def test_stream_all_goes_through_the_layers_and_leaves_out_what_is_resident() -> None:
    order = list(stream_all_order(residency({(4, 0), (5, 2)}, {(4, 1)}), layers=[4, 5], num_experts=3))
    assert order == [(4, 1), (4, 2), (5, 0), (5, 1)]


def test_routed_only_uploads_what_was_routed_and_is_not_resident() -> None:
    order = list(routed_only_order(residency({(4, 1), (5, 6)}), layer=4, routed_experts=[1, 3, 6]))
    assert order == [(4, 3), (4, 6)]
