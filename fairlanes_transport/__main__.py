"""Run the command line: ``python -m fairlanes_transport``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
