"""What a drill does to a cluster, and how it is undone.

On a cluster of `prfaas up` the drill does it itself; on any other it runs the commands that it was given.
"""

import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from prfaas.errors import PeerUnavailable
from services.drill.bounds import Drill, Sent
from services.drill.cluster_file import ClusterFile
from services.drill.processes import AnotherProcess, send
from services.http_client import ask

COMMAND_S = 300.0
#: By how much a switch outlasts what the drill means to take: it goes back by itself, should the drill die.
DEAD_MAN_S = 30.0


class Fault(Protocol):
    def describe(self) -> str:
        """What it is going to do, for who has to agree."""
        ...

    def inflict(self, seen: Sequence[Sent], seconds: float) -> str:
        """Do it, knowing the requests so far; what was hit. Raises PeerUnavailable when it cannot be done."""
        ...

    def heal(self) -> None:
        """Undo what does not undo itself. Idempotent."""
        ...


class Kill:
    """SIGKILL for the worker of a kind that was used most; `prfaas up` starts it again."""

    def __init__(self, file: ClusterFile, kind: str) -> None:
        self._file, self._kind = file, kind

    def describe(self) -> str:
        return f"kill one of {', '.join(self._file.workers(self._kind))} with SIGKILL"

    def inflict(self, seen: Sequence[Sent], seconds: float) -> str:
        used = Counter(getattr(one, self._kind) for one in seen)
        names = sorted(self._file.workers(self._kind), key=lambda name: -used[name])
        if not names:
            raise PeerUnavailable(self._kind, "no such worker runs any more")
        try:
            send(self._file.processes[names[0]], signal.SIGKILL)
        except AnotherProcess:
            raise PeerUnavailable(names[0], "it is gone already") from None
        return names[0]

    def heal(self) -> None:
        """The launcher does."""


class Switch:
    """Of the launcher's own: it is told for how long, and told when it is enough."""

    def __init__(self, what: str, off: str, on: str) -> None:
        self._what, self._off, self._on = what, off, on

    def describe(self) -> str:
        return f"take away {self._what} for a while"

    def inflict(self, seen: Sequence[Sent], seconds: float) -> str:
        self._post(f"{self._off}seconds={seconds + DEAD_MAN_S:g}")
        return self._what

    def heal(self) -> None:
        self._post(self._on)

    def _post(self, url: str) -> None:
        try:
            status, body = ask("POST", url)
        except OSError as error:
            raise PeerUnavailable(self._what, str(error)) from error
        if status != 200:
            raise PeerUnavailable(self._what, body.strip())


class Commands:
    """The operator's."""

    def __init__(self, inflict: str, undo: str) -> None:
        self._inflict, self._undo = inflict, undo

    def describe(self) -> str:
        return f"run {self._inflict!r}" + (f", then {self._undo!r}" if self._undo else "")

    def inflict(self, seen: Sequence[Sent], seconds: float) -> str:
        self._run(self._inflict)
        return self._inflict

    def heal(self) -> None:
        if self._undo:
            self._run(self._undo)

    def _run(self, command: str) -> None:
        try:
            done = subprocess.run(command, shell=True, check=False, timeout=COMMAND_S, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            raise PeerUnavailable(command, f"it has not ended after {COMMAND_S:g} s") from None
        if done.returncode:
            raise PeerUnavailable(command, f"it ended with {done.returncode}: {done.stderr.strip()[:500]}")


def fault_on(file: ClusterFile, drill: Drill) -> Fault:
    """Raises PeerUnavailable for what this cluster does not have."""
    match drill:
        case Drill.KILL_PREFILL:
            if not file.workers("prefill"):
                raise PeerUnavailable(file.cluster, "it has no prefill worker")
            return Kill(file, "prefill")
        case Drill.KILL_DECODE:
            if len(file.workers("decode")) < 2:
                raise PeerUnavailable(file.cluster, "it has no second PD node that could take over")
            return Kill(file, "decode")
        case Drill.WAN_CUT:
            if not file.relay:
                raise PeerUnavailable(file.cluster, "it has no line that could be cut: start it with --wan-mbit")
            return Switch("the line between the regions", f"{file.relay}/cut?", f"{file.relay}/mend")
        case Drill.STORE_OUTAGE:
            if not file.control:
                raise PeerUnavailable(file.cluster, "its store is an etcd: stop that with --exec and --undo")
            query = f"token={file.token}"
            return Switch("the store", f"{file.control}/store/stop?{query}&", f"{file.control}/store/start?{query}")


#: What an operator of a cluster elsewhere might run: what breaks it, and what undoes that.
ELSEWHERE = {
    Drill.WAN_CUT: (
        "kubectl apply -f NETWORK_POLICY_THAT_DENIES_KV_PORT",
        "kubectl delete -f NETWORK_POLICY_THAT_DENIES_KV_PORT",
    ),
    Drill.KILL_PREFILL: ("kubectl delete pod --force --grace-period=0 PREFILL_POD", ""),
    Drill.KILL_DECODE: ("kubectl delete pod --force --grace-period=0 DECODE_POD", ""),
    Drill.STORE_OUTAGE: (
        "kubectl scale statefulset ETCD --replicas=0",
        "kubectl scale statefulset ETCD --replicas=3",
    ),
}
