"""What a prefill worker answers: prefills toward another node, and refuses all else at once."""

from prfaas.errors import InvalidRequest
from prfaas.node.link_server import Emit, RuntimeSession
from prfaas.node.worker import Worker
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command, Failed, Prefill, WorkerDescription


class PrefillOnly:
    """The worker's runtime, less decoding."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> WorkerDescription:
        return self._worker.describe()

    def open_session(self, emit: Emit) -> RuntimeSession:
        return _Session(self._worker.open_session(emit), emit)


class _Session:
    def __init__(self, session: RuntimeSession, emit: Emit) -> None:
        self._session, self._emit = session, emit

    def handle(self, attempt: AttemptId, command: Command) -> None:
        if isinstance(command, Prefill | Cancel):
            self._session.handle(attempt, command)
        else:
            self._emit(attempt, Failed(InvalidRequest("this worker only prefills", param="node")))

    def close(self) -> None:
        self._session.close()
