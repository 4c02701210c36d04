import pytest

from strata_coord.coordinator.routes import choose_route, route_note


@pytest.mark.parametrize(
    ("sender", "receiver", "peers", "route", "why"),
    [
        ("cuda:1", "cuda:1", (), "device", "both on cuda:1"),
        ("cpu", "cpu", (), "host", "both on the CPU"),
        ("cuda:0", "cpu", (), "host", "from cuda:0 to cpu"),
        ("cuda:0", "cuda:1", ("cuda:1",), "host", "peer access, but it was not verified"),
        ("cuda:0", "cuda:1", ("cuda:2",), "host", "grants no peer access"),
        ("cuda:0", "cuda:1", None, "host", "peer access is not known"),
    ],
)
def test_rows_go_by_the_device_only_where_both_stages_share_it(sender, receiver, peers, route, why):
    choice = choose_route(sender, receiver, peers=peers)
    assert choice.route == route
    assert why in choice.why
    assert route_note(1, choice).startswith(f"hand-off 1 -> 2: {route} route, ")
