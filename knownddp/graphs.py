"""What the backwards of this rank looked like so far: whether the training graph is static."""

from __future__ import annotations

from typing import NamedTuple


class Graph(NamedTuple):
    """One backward: ``reached`` has a byte for each parameter, 1 for those that got a gradient; ``repeated`` got more.

    An undefined gradient (``None`` from an autograd Function) counts.
    """

    reached: bytes
    repeated: tuple[int, ...]


class GraphHistory:
    """The first graph, and whether all later ones were the same.

    Args:
        is_promised: the user promised that graphs never change (``static_graph=True``); one that does is an error.
    """

    def __init__(self, *, is_promised: bool) -> None:
        self.is_promised = is_promised
        self.first: Graph | None = None
        self.is_static = True
        self._fired = b""  # at first, and with a gradient that was defined

    def breaks_promise(self, graph: Graph) -> bool:
        """Whether ``graph`` was promised to be like the first one and is not."""
        return self.is_promised and self.first is not None and graph != self.first

    def note(self, graph: Graph, fired: bytes) -> None:
        """A backward that went well had ``graph``. ``fired``: as ``reached``, for defined gradients alone."""
        if self.first is None:
            self.first, self._fired = graph, fired
        self.is_static = self.is_static and graph == self.first

    def expected(self) -> bytes | None:
        """Which gradients a backward should bring, if that was promised and has been seen."""
        return self._fired if self.is_promised and self.first is not None else None

    def differences(self, graph: Graph) -> tuple[list[int], list[int], list[int]]:
        """Parameters reached now and not at first, at first and not now, and a different number of times."""
        first = self.first if self.first is not None else graph
        pairs = list(enumerate(zip(first.reached, graph.reached, strict=True)))
        more = [i for i, (then, now) in pairs if now and not then]
        fewer = [i for i, (then, now) in pairs if then and not now]
        repeated = {*first.repeated, *graph.repeated} - {*more, *fewer}
        others = [i for i in sorted(repeated) if first.repeated.count(i) != graph.repeated.count(i)]
        return more, fewer, others
