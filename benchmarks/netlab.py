"""A network in one machine: `python -m benchmarks.netlab --help`. The laboratory itself is `oktopk.bench.netlab`."""

from __future__ import annotations

import signal
import sys

from oktopk.bench.netlab import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
