"""Hosts that are lost for longer than the TTL: told, fenced, and back by themselves (promises R5, R9).

They use mutual TLS and a token.
"""

from pathlib import Path

import pytest

from tests.hosts.lab import Lab, require_hosts
from tests.hosts.runs import PORT, START_WITHIN, Member, members
from tests.support.processes import require

pytestmark = pytest.mark.some_of(0)  # it takes minutes

require_hosts()


def write_secrets(folder: Path, name: str) -> dict[str, str]:
    """Write a token, the certificate of an authority, and one it issued for a host, with its key. Return the paths."""
    require("trustme")
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(name)
    paths = {what: folder / what for what in ("token_file", "ca", "cert", "key")}
    paths["token_file"].write_text("a secret of twenty-five bytes")
    authority.cert_pem.write_to_path(str(paths["ca"]))
    issued.cert_chain_pems[0].write_to_path(str(paths["cert"]))
    issued.private_key_pem.write_to_path(str(paths["key"]))
    return {what: str(path) for what, path in paths.items()}


async def of_size(member: Member, size: int) -> None:
    """Wait for a round of this size. A node that returns may first meet the quicker ones in a smaller round."""
    while (await member.round())["size"] != size:
        pass


async def test_hosts_that_are_cut_off_one_way_or_both_are_lost_fenced_and_come_back(tmp_path: Path) -> None:
    """Neither a FIN nor a RST announces the loss. One of the hosts still receives all messages of the store."""
    async with Lab(5, style="debian") as lab:
        head, *hosts = lab.hosts
        await lab.set_mtu(hosts[0], 576)
        secrets = write_secrets(tmp_path, head.name)
        given = "&".join(f"{name}={path}" for name, path in secrets.items())
        url = f"tcps://{head.name}:{PORT}/job-7?{given}&min_nodes=2&max_nodes=4&ttl=3"
        options = [word for name, path in secrets.items() for word in (f"--{name.replace('_', '-')}", path)]
        async with head.python("-m", "rdzv", "serve", *options) as server:
            await server.says("listens on", timeout=START_WITHIN)
            async with members(url, *hosts) as everyone:
                for member in everyone:
                    await of_size(member, 4)
                await lab.cut(hosts[2])
                await lab.cut_from(hosts[3])
                for member in everyone[:2]:
                    await of_size(member, 2)
                for member in everyone[2:]:
                    # Its changes may not contain `Dropped`: the host that can only receive gets the other's loss first,
                    # and is then on its way into another round.
                    await member.child.says(f"node {member.host.name} was dropped", timeout=60.0)
                await lab.mend()
                for member in everyone:
                    await of_size(member, 4)
