"""Which way residual rows go to the next stage: by the receiver's device memory or by the host. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata_coord.ipc.messages import Route

__all__ = ["RouteChoice", "choose_route", "route_note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """The route of one link, and why it is that one."""

    route: Route
    why: str


def choose_route(sender: str, receiver: str, *, peers: Sequence[str] | None = None) -> RouteChoice:
    """Return the route between two stages.

    Two processes on one card always reach the same memory. Between cards a driver's yes is not enough: writes
    may be lost or bounced through the host at a tenth of the rate, and until a stage measures that, rows go
    by the host.

    Args:
        sender: Device of the stage that sends, "cpu" or "cuda:N".
        receiver: Device of the stage that receives.
        peers: Devices that the driver says the sender's card can write to; None: not known.
    """
    if sender == receiver != "cpu":
        return RouteChoice(route="device", why=f"both on {sender}")
    if "cpu" in (sender, receiver):
        which = "both on the CPU" if sender == receiver else f"from {sender} to {receiver}"
        return RouteChoice(route="host", why=which)
    if peers is None:
        said = "peer access is not known"
    elif receiver in peers:
        said = "the driver grants peer access, but it was not verified"
    else:
        said = "the driver grants no peer access"
    return RouteChoice(route="host", why=f"from {sender} to {receiver}: {said}")


def route_note(link: int, choice: RouteChoice) -> str:
    """Return the line that says how rows cross link `link`, from stage link to stage link + 1."""
    return f"hand-off {link} -> {link + 1}: {choice.route} route, {choice.why}"
