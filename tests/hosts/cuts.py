"""Cut a network of eight members many times, and check that it costs delay and nothing else (promise R8).

    python -m tests.hosts.cuts --cuts 50          # of all eight members: 400 in all
    python -m tests.hosts.cuts --cuts 50 --forget # and drop the packets of existing connections after each

Each cut takes a random time, from 0.5 to 5 s, and comes at a random phase of the renewals, with `ttl=10`. Half of the
members send requests all the time, and report when they get answers again. The others only renew their leases, as a
member does while it computes.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from tests.hosts.lab import Lab
from tests.hosts.runs import Member, members, serving, slurm_url

TTL = 10.0
MEMBERS = 8
SHORTEST = 0.5  # seconds; the longest cut takes half of the TTL
ANSWERED_WITHIN = 10.0  # seconds after a cut until a member without an answer is reported as silent
NOT_TO_BE_HEARD = ("NodesLost", "NodesLeft", "NodesWaiting", "Dropped", "Closed", "error", "end")


@dataclass(slots=True)
class Report:
    """The results.

    Attributes:
        cuts: The number of cuts, each of one member.
        back: Seconds from the network's return to the next answer, of the members that send requests all the time.
        troubles: Events that members should not have reported.
    """

    cuts: int = 0
    back: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line, and one for each trouble."""
        back = sorted(self.back)
        worst = f"back after {statistics.median(back):.2f} s (median), {back[-1]:.2f} s at most" if back else "no probe"
        return f"{self.cuts} cuts: {worst}; {len(self.troubles)} troubles" + "".join(
            f"\n  {one}" for one in self.troubles
        )


async def cut_often(
    cuts: int, *, seed: int, forget: bool = False, hosts: int = MEMBERS, ttl: float = TTL, said: bool = False
) -> Report:
    """Cut all members at once, this many times. Return the report."""
    rng, report = random.Random(seed), Report()
    async with Lab(hosts + 1, style="cloud") as lab:
        head, *others = lab.hosts
        url = slurm_url(head.address, f"min_nodes={hosts}&ttl={ttl:g}")
        half = hosts // 2
        async with (
            serving(head),
            members(url, *others[:half], probe=True) as asking,
            members(url, *others[half:]) as quiet,
        ):
            everyone = asking + quiet
            for member in everyone:
                await member.round()
            for number in range(cuts):
                await asyncio.sleep(rng.uniform(0.5, ttl / 3))  # a renewal comes every third of the TTL
                seconds = rng.uniform(SHORTEST, ttl / 2)
                await _cut_once(lab, asking, report, seconds, forget=forget)
                report.cuts += hosts
                if said:
                    print(f"cut {number}: {seconds:.2f} s, back after {report.back[-1]:.2f} s", flush=True)
            await asyncio.sleep(ttl + 1.0)  # every effect of a cut is known by then
            for member in everyone:
                troubles = member.events(*NOT_TO_BE_HEARD)
                report.troubles += [f"{member.host.name}: {trouble}" for trouble in troubles]
                if len(member.events("round")) != 1:
                    report.troubles.append(f"{member.host.name} was in {len(member.events('round'))} rounds")
    return report


async def _cut_once(lab: Lab, asking: list[Member], report: Report, seconds: float, *, forget: bool) -> None:
    began = time.monotonic()
    head = lab.hosts[0]
    await lab.cut(head)  # cuts all members off from the store at the same moment
    await asyncio.sleep(seconds)
    if forget:
        await lab.forget_flows(head)
    mended = await lab.mend_cuts()
    deadline = mended + ANSWERED_WITHIN
    for member in asking:
        while True:
            answers = [line["at"] for line in member.events("back") if line["at"] > began]
            if answers and answers[-1] >= mended:
                report.back.append(answers[-1] - mended)
                break
            if time.monotonic() > deadline:
                report.troubles.append(f"{member.host.name} has not been answered for {ANSWERED_WITHIN:g} s")
                break
            await asyncio.sleep(0.02)


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.cuts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=50, help="of all eight members at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--forget", action="store_true", help="let the flows be forgotten in each cut")
    options = parser.parse_args()
    report = asyncio.run(cut_often(options.cuts, seed=options.seed, forget=options.forget, said=True))
    print(report)
    return 1 if report.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
