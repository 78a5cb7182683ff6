"""Send what Django sends after a commit into the lane of when it was asked for.

A function given to ``transaction.on_commit`` runs when the transaction ends, and by then the block
``with tenant(...)`` around the call may have been left.  Programs without Django never import it for this.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

MODULE = "django.db.backends.base.base"
_MARK = "_fairlanes_tenant"


def install(bind: Callable[[Any], Any]) -> None:
    """Wrap Django's ``on_commit`` once, if this program uses Django's database; else do nothing.

    Args:
        bind: returns a function that runs in the tenant of now.
    """
    if "django.db" not in sys.modules:
        return
    try:
        # Django loads it at the first query only, and a block may begin before that.
        wrapper = getattr(import_module(MODULE), "BaseDatabaseWrapper", None)
    except Exception:  # Django is being imported just now: the next block tries again
        return
    original = getattr(wrapper, "on_commit", None)
    if wrapper is None or original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def on_commit(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, bind(func), *args, **kwargs)

    setattr(on_commit, _MARK, True)
    wrapper.on_commit = on_commit
