"""For all tests."""

import signal

# Whom a shell starts in the background ignores Ctrl-C, and so does whatever it starts. What tests start is to heed it.
signal.signal(signal.SIGINT, signal.default_int_handler)
