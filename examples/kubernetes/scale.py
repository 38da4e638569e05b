"""Resize a run when the number of pods of its Job changes: `kubectl patch`, or an autoscaler.

    python examples/kubernetes/scale.py tcp://rdzv-store:29400/train train

It runs in a pod of its own, by scale.yaml, with its permissions. The maximum of nodes of the run becomes the Job's
parallelism; the minimum stays. If the number falls, the run has fewer nodes from its next round on, and the pods that
Kubernetes ends leave as drained nodes.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import rdzv.sync

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
AGAIN_AFTER = 5.0  # seconds; Kubernetes ends each watch after some minutes


def parallelisms(job: str) -> Iterator[int]:
    """Yield the number of pods of the job, now and at each change, until the watch ends."""
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    jobs = f"/apis/batch/v1/namespaces/{(ACCOUNT / 'namespace').read_text()}/jobs"
    request = urllib.request.Request(f"{server}{jobs}?watch=1&fieldSelector=metadata.name={job}")
    request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, context=trusted) as answer:
        for line in answer:
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                yield event["object"]["spec"]["parallelism"]


def main(url: str, job: str) -> None:
    known = 0
    while True:
        try:
            for nodes in parallelisms(job):
                if nodes != known:
                    with rdzv.sync.connect(url) as run:
                        run.resize(max_nodes=nodes, reason=f"the Job {job} was scaled")
                    print(f"resized to at most {nodes} nodes", flush=True)
                    known = nodes
        except (OSError, rdzv.RendezvousError) as error:
            print(error, file=sys.stderr, flush=True)
        time.sleep(AGAIN_AFTER)


if __name__ == "__main__":
    main(*sys.argv[1:])
