"""Faults in flat buckets, in how means are formed, and in what Coq knows of both."""

from __future__ import annotations

from typing import Final

from ..seeded import Seed

FLAT: Final = "knownddp/flat.py"
EXCHANGE: Final = "knownddp/exchange.py"
LAYOUT_V: Final = "proofs/coq/Layout.v"
PACK_V: Final = "proofs/coq/Pack.v"
MEAN_V: Final = "proofs/coq/Mean.v"
MEMORY_ORDER: Final = "sources.append(dense(one).as_strided(view.shape, view.stride()))"

SEEDS: Final = (
    Seed("strides with gaps pass for dense", FLAT, "if strides[d] != step:", "if strides[d] < step:", ("C2", "C6")),
    Seed("overlapping strides pass for dense", FLAT, "if strides[d] != step:", "if strides[d] > step:", ("C6",)),
    Seed(
        "row-major is column-major",
        FLAT,
        "for d in reversed(range(len(shape))):",
        "for d in range(len(shape)):",
        ("C2", "C6"),
    ),
    Seed("dimensions of size 1 matter", FLAT, "if shape[d] != 1)", "if True)", ("C2", "C5", "C6")),
    Seed(
        "dimensions of size 1 are kept",
        FLAT,
        "dense, step = [1] * len(shape), 1",
        "dense, step = list(strides), 1",
        ("C2", "C6"),
    ),
    Seed(
        "canonical strides are always row-major",
        FLAT,
        "return row_major(shape) if is_row_major else tuple(dense)",
        "return row_major(shape)",
        ("C2", "C6"),
    ),
    Seed("dense is row-major", FLAT, "n == 1 or s == c for", "s == c for", ("C2", "C5")),
    Seed("segments overlap", FLAT, "offset += spec.numel", "offset += max(spec.numel - 1, 0)", ("C3", "C7")),
    Seed("segments have gaps", FLAT, "numel = sum(spec.numel for", "numel = sum(spec.numel + 1 for", ("C7",)),
    Seed("gradients are packed in the order of memory", FLAT, "sources.append(dense(one))", MEMORY_ORDER, ("C7", "C8")),
    Seed(
        "what is absent stays what memory held", FLAT, "                view.zero_()", "                pass", ("C8",)
    ),
    Seed(
        "what stood there before is forgotten",
        FLAT,
        "                sources.append(dense(old))\n",
        "                sources.append(torch.zeros_like(old))\n",
        ("C8",),
    ),
    Seed(
        "what stood there before counts alone",
        FLAT,
        "            torch._foreach_add_(added_to, addends)\n",
        "            pass\n",
        ("C8",),
    ),
    Seed(
        "means keep the strides they travelled in",
        FLAT,
        "mean.layout is not torch.strided or mean.stride() == param.stride()",
        "True",
        ("C9",),
    ),
    Seed(
        "means come back in the order of memory",
        FLAT,
        "device=mean.device).copy_(mean)",
        "device=mean.device).set_(mean.untyped_storage(), mean.storage_offset(), param.shape, param.stride())",
        ("C9",),
    ),
    Seed(
        "shares are divided after they overflowed",
        FLAT,
        "self.flat.div_(divisor)",
        "self.flat.mul_(divisor).div_(divisor * divisor)",
        ("C11",),
    ),
    Seed("shares are not divided", FLAT, "if divisor != 1:", "if False:", ("C7", "C8", "C11")),
    Seed(
        "shares are divided twice",
        FLAT,
        "self.flat.div_(divisor)",
        "self.flat.div_(divisor).div_(divisor)",
        ("C7", "C8", "C11"),
    ),
    Seed(
        "shares are a thousandth off",
        FLAT,
        "self.flat.div_(divisor)",
        "self.flat.div_(divisor * 1.001)",
        ("C7", "C8", "C11"),
    ),
    Seed(
        "shares lose their smallest values",
        FLAT,
        "self.flat.div_(divisor)",
        "self.flat.div_(divisor)[self.flat.abs() < 1e-4] = 0",
        ("C11",),
    ),
    Seed(
        "large shares are a hundredth off",
        FLAT,
        "torch.div(grad, divisor, out=view)",
        "torch.div(grad, divisor * 1.01, out=view)",
        ("C7", "C8", "C11"),
    ),
    Seed(
        "large shares of a narrower dtype are not divided",
        FLAT,
        "view.copy_(grad).div_(divisor)",
        "view.copy_(grad)",
        ("C7",),
    ),
    Seed(
        "small shares are copied and not divided",
        FLAT,
        "grads)  # type: ignore[arg-type]\n            self._divide(divisor)",
        "grads)",
        ("C7", "C8", "C11"),
    ),
    Seed(
        "small gradients are copied in the order of memory",
        FLAT,
        "torch._foreach_copy_(self.views, grads)",
        "torch._foreach_copy_(self.views, [g.as_strided(v.shape, v.stride()) for g, v in zip(grads, self.views)])",
        ("C7", "C8"),
    ),
    Seed(
        "large gradients are divided in the order of memory",
        FLAT,
        "torch.div(grad, divisor, out=view)",
        "torch.div(grad.as_strided(view.shape, view.stride()), divisor, out=view)",
        ("C7", "C8"),
    ),
    Seed("shares are not divided in place", EXCHANGE, "(1,)).div_(self._divisor), [grad]", "(1,)), [grad]", ("C11",)),
    Seed(
        "shares are divided twice in place",
        EXCHANGE,
        "(1,)).div_(self._divisor), [grad]",
        "(1,)).div_(self._divisor**2), [grad]",
        ("C11",),
    ),
    Seed(
        "what was written ahead is taken for missing",
        FLAT,
        "            if position in self.written:\n                continue\n",
        "            if position in self.written and grad is not None:\n                continue\n",
        ("C7", "C8"),
    ),
    Seed(
        "nobody divides",
        EXCHANGE,
        "self._divisor = 1 if terms.hook is not None else terms.divisor",
        "self._divisor = 1",
        ("C11",),
    ),
    Seed(
        "Coq: any stride is dense",
        LAYOUT_V,
        "(n = 1 \\/ s = w) /\\ packed (w * n) r",
        "(n = 1 \\/ s <= w) /\\ packed (w * n) r",
        ("C1",),
    ),
    Seed("Coq: the volume before is not counted", LAYOUT_V, "packed (w * n) r", "packed w r", ("C1",)),
    Seed(
        "Coq: the shipped test asks for nothing", LAYOUT_V, "Nat.eqb s w && steps (w * n) r", "steps (w * n) r", ("C2",)
    ),
    Seed(
        "Coq: dense strides may have a gap",
        LAYOUT_V,
        "Definition fill (t : dims) : Prop := forall o, o < volume t ->",
        "Definition fill (t : dims) : Prop := forall o, S o < volume t ->",
        ("C2",),
    ),
    Seed(
        "Coq: canonical strides are those given",
        LAYOUT_V,
        "has_zero shape || negb (is_dense shape strides) ||",
        "has_zero shape ||",
        ("C2",),
    ),
    Seed("Coq: segments overlap", PACK_V, "volume t + begins_at r q", "volume t - 1 + begins_at r q", ("C3",)),
    Seed(
        "Coq: elements are written elsewhere",
        PACK_V,
        "write m (place ts e) (value e)) (elements ts) m.",
        "write m (S (place ts e)) (value e)) (elements ts) m.",
        ("C3",),
    ),
    Seed(
        "Coq: only the first parameter is written",
        PACK_V,
        "(indices (nth p ts []))) (seq 0 (length ts))",
        "(indices (nth p ts []))) (seq 0 1)",
        ("C3",),
    ),
    Seed(
        "Coq: a sum is rounded for nothing",
        MEAN_V,
        "S (Nat.max (depth a) (depth b))",
        "Nat.max (depth a) (depth b)",
        ("C10",),
    ),
    Seed("Coq: a quotient is exact", MEAN_V, "Share _ => 1%nat", "Share _ => 0%nat", ("C10",)),
    Seed(
        "Coq: subnormal quotients are exact",
        MEAN_V,
        "+ ranks t * eta * (1 + u) ^ depth t.",
        "+ 0 * eta * (1 + u) ^ depth t.",
        ("C10",),
    ),
)
