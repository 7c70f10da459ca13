"""What must not outlive the tests, however they end, also by SIGKILL: a shell waits for the end of its input, which
comes with the end of whoever writes to it, and then signals the process that it was told of last.

Processes of a cluster end with their launcher by themselves; a frozen one cannot, and etcd does not.
"""

import signal
import subprocess

SCRIPT = 'while read -r pid; do last=$pid; done; test -z "$last" || kill -s "$0" "$last"'
END_S = 5.0


class Guard:
    def __init__(self, last_signal: signal.Signals) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, last_signal.name.removeprefix("SIG")],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """This one from now on."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(b"%d\n" % pid)
        self._shell.stdin.flush()

    def act(self) -> None:
        """Signal it now, unless it is gone."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(END_S)
