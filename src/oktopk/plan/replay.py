"""SimGrid's replay of programs of messages: a script for any Python that has `simgrid`, which need not have torch.

    python -I -S replay.py < programs.json

Input: ranks in levels (`sizes`, `bytes_per_s`, `latency_s`, the innermost first), `message_s`, and for each rank a
program: a list of rounds [targets, num_bytes, sources]. Output: the seconds until the last rank has ended.
"""

import json
import sys
from typing import Any

SETTINGS = ("--log=root.thres:error", "--cfg=network/model:CM02", "--cfg=network/crosstraffic:0",
            "--cfg=network/TCP-gamma:0", "--cfg=contexts/stack-size:64")  # fmt: skip
"""CM02 takes latency and bandwidth as they are. SimGrid's default multiplies latency, as for new connections."""

UNLIMITED = 1e18


def main() -> None:
    """Read, simulate, print."""
    sys.path.append("/usr/lib/python3/dist-packages")  # of Debian's package, which -I -S leaves out
    import simgrid  # type: ignore[import-not-found]

    given = json.load(sys.stdin)
    engine = simgrid.Engine(["replay", *SETTINGS])
    hosts = platform(simgrid, given["sizes"], given["bytes_per_s"], given["latency_s"])
    for rank, host in enumerate(hosts):
        simgrid.Actor.create(f"rank {rank}", host, run, simgrid, rank, given["programs"][rank], given["message_s"])
    engine.run()
    print(json.dumps({"seconds": engine.clock}))


def run(simgrid: Any, rank: int, program: Any, message_s: float) -> None:
    """Do each round: send, then wait for all that comes and all that goes."""
    mailbox = simgrid.Mailbox.by_name
    for targets, num_bytes, sources in program:
        if message_s and targets:
            simgrid.this_actor.sleep_for(message_s * len(targets))
        coming = [mailbox(f"{source} {rank}").get_async() for source in sources]  # both halves stay alive
        going = [mailbox(f"{rank} {target}").put_async(rank, int(num_bytes)) for target in targets]
        for comm in going:
            comm.wait()
        for comm, _ in coming:
            comm.wait()


def platform(simgrid: Any, sizes: list[int], bytes_per_s: list[float], latency_s: list[float]) -> list[Any]:
    """Return the hosts of nested stars, each part of a level behind a full-duplex link of its own."""
    hosts: list[Any] = []

    def link(zone: Any, name: str, level: int) -> Any:
        below = latency_s[level - 1] if level else 0.0
        made = zone.create_split_duplex_link(name, bytes_per_s[level] or UNLIMITED)
        made.set_latency(max(0.0, latency_s[level] - below) / 2)
        return simgrid.LinkInRoute(made.seal(), simgrid.LinkInRoute.Direction.UP)

    def star(parent: Any, name: str, level: int) -> Any:
        zone = simgrid.NetZone.create_star_zone(name)
        if parent is not None:
            zone.set_parent(parent)
        router = zone.create_router(f"{name} router")
        for i in range(sizes[level]):
            own = f"{name}.{i}"
            if level:
                inner, gateway = star(zone, own, level - 1)
                ends = inner.netpoint, None, gateway, None
            else:
                host = zone.create_host(own, 1e12)
                hosts.append(host.seal())
                ends = host.netpoint, None, None, None
            zone.add_route(*ends, [link(zone, f"{own} link", level)], True)
        return zone.seal(), router

    star(None, "all", len(sizes) - 1)
    return hosts


if __name__ == "__main__":
    main()
