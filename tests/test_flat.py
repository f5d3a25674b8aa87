"""Strides, and gradients of any strides packed into flat buckets. Expected values are worked out by index."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, spec
from torch import Tensor

from knownddp.flat import FlatBucket, canonical_strides, is_dense, row_major, sparse_share, with_strides_of
from knownddp.specs import ParamSpec

# -- strides

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@examples(300)
@given(shapes)
def test_row_major_is_how_torch_lays_out_a_new_tensor(shape):
    assert row_major(shape) == torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    ("shape", "strides", "canonical"),
    [
        pytest.param((2, 3), (3, 1), (3, 1), id="row-major"),
        pytest.param((2, 3), (1, 2), (1, 2), id="transposed"),
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3), id="channels last"),
        pytest.param((2, 3, 4), (1, 8, 2), (1, 8, 2), id="permuted"),
        pytest.param((8, 3, 1, 1), (3, 1, 3, 3), (3, 1, 1, 1), id="1x1 kernel, channels last"),
        pytest.param((8, 3, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), id="1x1 kernel, row-major"),
        pytest.param((8, 1, 3, 3), (9, 1, 3, 1), (9, 9, 3, 1), id="one channel, channels last"),
        pytest.param((2, 1, 3), (1, 77, 2), (1, 1, 2), id="transposed around a dimension of size 1"),
        pytest.param((1,), (5,), (1,), id="one element"),
        pytest.param((), (), (), id="0-d"),
        pytest.param((2, 3), (0, 1), (3, 1), id="expanded"),
        pytest.param((2, 3), (6, 2), (3, 1), id="sliced inside"),
        pytest.param((2, 3), (4, 1), (3, 1), id="sliced outside"),
        pytest.param((3, 2), (1, 1), (2, 1), id="overlapping"),
        pytest.param((2, 0, 3), (1, 5, 7), (3, 3, 1), id="no elements"),
    ],
)
def test_canonical_strides_are_the_own_ones_where_dense_and_row_major_elsewhere(shape, strides, canonical):
    assert canonical_strides(shape, strides) == canonical


def torch_says_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    one = torch.empty_strided(tuple(shape), tuple(strides), device="meta")
    return torch.ops.aten.is_non_overlapping_and_dense.default(one)


def test_is_dense_gives_the_answers_of_torch():
    """Every shape of up to three dimensions under every strides of some, then permuted and slightly wrong layouts.

    Tensors without elements are left out: torch calls all of them dense, here only the row-major layout is.
    """
    pairs = [
        (shape, strides)
        for n in range(4)
        for shape in itertools.product((1, 2, 3), repeat=n)
        for strides in itertools.product((0, 1, 2, 3, 4, 6, 9), repeat=n)
    ]
    draw = random.Random(0)
    for _ in range(12_000):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(1, 5))]
        strides, step = [0] * len(shape), 1
        for d in draw.sample(range(len(shape)), len(shape)):
            strides[d] = step
            step *= shape[d]
        if draw.random() < 0.5:
            strides[draw.randrange(len(shape))] = draw.randint(0, step)
        pairs.append((shape, strides))
    answers = [is_dense(shape, strides) for shape, strides in pairs]
    assert answers == [torch_says_dense(shape, strides) for shape, strides in pairs]
    assert len(pairs) == 1 + 3 * 7 + 9 * 49 + 27 * 343 + 12_000  # 21,724
    assert min(answers.count(True), answers.count(False)) > 5_000


layouts = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
)


@examples(300)
@given(layouts)
def test_canonical_strides_are_dense_and_their_own_canonical_strides(layout):
    shape, strides = layout
    canonical = canonical_strides(shape, strides)
    assert torch_says_dense(shape, canonical)
    assert canonical_strides(shape, canonical) == canonical


@examples(300)
@given(layouts, st.integers(0, 99))
def test_canonical_strides_do_not_see_strides_of_dimensions_of_size_1(layout, other):
    shape, strides = layout
    changed = [other if n == 1 else s for n, s in zip(shape, strides, strict=True)]
    assert canonical_strides(shape, changed) == canonical_strides(shape, strides)


# -- packing


def packed(specs: Sequence[ParamSpec], grads: Sequence[Tensor | None], divisor: int = 1) -> FlatBucket:
    bucket = FlatBucket(specs)
    bucket.fill(grads, [None] * len(specs), divisor)
    return bucket


MATRIX = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
WIDE = torch.arange(24.0).reshape(4, 6)
SAME_MATRIX = [
    pytest.param(MATRIX, id="row-major"),
    pytest.param(MATRIX.t().contiguous().t(), id="transposed"),
    pytest.param(torch.stack([MATRIX, -MATRIX], dim=2)[:, :, 0], id="with gaps"),
    pytest.param(torch.cat([MATRIX, -MATRIX], dim=1)[:, :3], id="rows apart"),
    pytest.param(MATRIX.to_sparse(), id="sparse"),
    pytest.param(MATRIX.clone().requires_grad_() * 1, id="with a graph"),
]


@pytest.mark.parametrize("grad", SAME_MATRIX)
@pytest.mark.parametrize(
    ("strides", "flat"),
    [
        pytest.param((3, 1), [1, 2, 3, 4, 5, 6], id="into row-major"),
        pytest.param((1, 2), [1, 4, 2, 5, 3, 6], id="into column-major"),
    ],
)
def test_elements_go_by_index_into_the_canonical_layout(grad, strides, flat):
    """Whatever the gradient's strides, (0, 1) = 2 is at the place of (0, 1)."""
    bucket = packed([spec(2, 3, strides=strides)], [grad])
    assert bucket.flat.tolist() == flat
    assert bucket.views[0].stride() == strides
    assert torch.equal(bucket.views[0], MATRIX)
    assert not bucket.views[0].requires_grad


def test_an_expanded_gradient_is_written_out():
    """sum().backward() gives a gradient of strides (0, 0)."""
    assert packed([spec(2, 2)], [torch.ones(()).expand(2, 2)]).flat.tolist() == [1, 1, 1, 1]


@st.composite
def strided_int_tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Small integers, any strides: permuted, with gaps, or expanded."""
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(1, 2))
    base = torch.tensor(draw(st.lists(st.integers(-8, 8), min_size=1, max_size=5)), dtype=torch.float32)
    sizes = [shape[d] * gap for d in order]
    numel = torch.Size(sizes).numel()
    filled = base.repeat(numel // len(base) + 1)[:numel].reshape(sizes)[tuple(slice(None, None, gap) for _ in order)]
    back = filled.permute([order.index(d) for d in range(len(shape))])
    if shape and draw(st.booleans()):
        return back.narrow(0, 0, min(1, shape[0])).expand(shape)
    return back


@st.composite
def fillings(draw: st.DrawFn) -> tuple[list[ParamSpec], list[Tensor | None], list[Tensor | None], int]:
    specs: list[ParamSpec] = []
    grads: list[Tensor | None] = []
    held_back: list[Tensor | None] = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
        order = draw(st.permutations(range(len(shape))))
        strides = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))]).stride()
        specs.append(spec(*shape, strides=canonical_strides(shape, strides)))
        grads.append(draw(st.none() | strided_int_tensors(shape)))
        held_back.append(draw(st.none() | strided_int_tensors(shape)))
    return specs, grads, held_back, draw(st.sampled_from([1, 2, 4]))


@examples(300)
@given(fillings())
def test_each_element_of_flat_is_old_plus_new_over_divisor_at_the_place_its_index_says(filling):
    """Integers of at most 16 over 1, 2 or 4 are exact."""
    specs, grads, held_back, divisor = filling
    bucket = FlatBucket(specs)
    bucket.fill(grads, held_back, divisor)

    wanted: dict[int, float] = {}
    offset = 0
    for one, grad, old in zip(specs, grads, held_back, strict=True):
        for index in itertools.product(*map(range, one.shape)):
            place = offset + sum(k * stride for k, stride in zip(index, one.strides, strict=True))
            wanted[place] = sum(x[index].item() for x in (grad, old) if x is not None) / divisor
        offset += one.numel
    assert dict(enumerate(bucket.flat.tolist())) == wanted


def test_what_was_held_back_is_averaged_with_the_gradient():
    """(1 + 4) / 2; 3 / 2 where only the old one stands; 5 / 2 where only the new one does; nothing is zero."""
    bucket = FlatBucket([spec(1)] * 4)
    new = [torch.tensor([1.0]), None, torch.tensor([5.0]), None]
    old = [torch.tensor([4.0]), torch.tensor([3.0]), None, None]
    bucket.fill(new, old, 2)
    assert bucket.flat.tolist() == [2.5, 1.5, 2.5, 0.0]
    assert [t.item() if t is not None else None for t in (*new, *old)] == [1, None, 5, None, 4, 3, None, None]


def test_a_reused_bucket_keeps_nothing():
    bucket = packed([spec(2)], [torch.tensor([7.0, 7.0])])
    bucket.fill([None], [None], 2)
    assert bucket.flat.tolist() == [0, 0]


def test_float16_is_divided_before_it_is_summed():
    """2^15 + 2^15 exceeds 65504, the largest float16; 2^15 / 2 twice is 2^15 again."""
    flats = [packed([spec(1, dtype=torch.float16)], [torch.tensor([2.0**15], dtype=torch.float16)], 2).flat] * 2
    assert (flats[0] + flats[1]).tolist() == [2.0**15]


@pytest.mark.parametrize("numel", [1, 2**13], ids=["small", "large"])
@pytest.mark.parametrize("old", [None, 60000.0])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_wider_gradient_is_divided_before_it_is_rounded(numel, old, is_early):
    """10^5 / 2 lies halfway between 49984 and 50016 in float16, of which 49984 is even; 10^5 itself is infinite."""
    bucket = FlatBucket([spec(numel, dtype=torch.float16)])
    before = None if old is None else torch.full((numel,), old)
    grad = torch.full((numel,), 1e5 - (old or 0.0))
    if is_early:
        bucket.write(0, grad, before, 2)
    bucket.fill([None if is_early else grad], [before], 2)
    assert bucket.flat.unique().tolist() == [49984.0]


@pytest.mark.parametrize("old", [None, 34048.0])
def test_a_gradient_that_its_bucket_cannot_hold_is_divided_before_it_is_rounded(old):
    """99840 is 195 * 2^9, so exact in bfloat16, and infinite in float16; half of it is 1560 * 2^5, exact in both.
    34048 is 133 * 2^8 and 65792 is 257 * 2^8, which bfloat16 rounds to 65536: half of the sum is 49792.
    """
    before = None if old is None else torch.tensor([old], dtype=torch.bfloat16)
    grad = torch.tensor([99840.0 if old is None else 65792.0], dtype=torch.bfloat16)
    bucket = FlatBucket([spec(1, dtype=torch.float16)])
    bucket.fill([grad], [before], 2)
    assert bucket.flat.tolist() == [49920.0 if old is None else 49792.0]


def test_a_sum_is_not_rounded_to_the_narrower_dtype_of_its_parts():
    """1 + 2^-9 needs ten bits; bfloat16 has eight."""
    old, grad = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-9], dtype=torch.bfloat16)
    bucket = FlatBucket([spec(1)])
    bucket.fill([grad], [old], 2)
    assert bucket.flat.tolist() == [(1 + 2.0**-9) / 2]


def test_bfloat16_quotients_are_rounded_to_the_nearest_of_8_bits():
    """1/3 is 1.0101010|1010...b / 4, which rounds up to 1.0101011b / 4 = 171 / 512."""
    flat = packed([spec(1, dtype=torch.bfloat16)], [torch.tensor([1.0], dtype=torch.bfloat16)], 3).flat
    assert flat.dtype is torch.bfloat16 and flat.item() == 171 / 512


@pytest.mark.parametrize("grad", [torch.tensor([2 + 4j]), torch.tensor([2 - 4j]).conj()], ids=["plain", "conj view"])
def test_complex_gradients_keep_their_imaginary_part(grad):
    assert packed([spec(1, dtype=torch.complex64)], [grad], 2).flat.tolist() == [1 + 2j]


def test_0_d_and_empty_parameters_take_their_room_and_no_more():
    grads = [torch.tensor(3.0), torch.empty(0, 2), torch.tensor([4.0]), torch.empty(0)]
    bucket = packed([spec(), spec(0, 2), spec(1), spec(0)], grads)
    assert bucket.flat.tolist() == [3, 4]
    assert [view.shape for view in bucket.views] == [(), (0, 2), (1,), (0,)]


def test_views_share_the_storage_of_flat_one_behind_the_other():
    bucket = packed([spec(2), spec(2, 3, strides=(1, 2))], [None, None])
    assert bucket.flat.shape == (8,) and bucket.flat.is_contiguous()
    bucket.flat.copy_(torch.arange(8.0))
    assert bucket.views[0].tolist() == [0, 1]
    assert bucket.views[1].tolist() == [[2, 4, 6], [3, 5, 7]]
    assert {v.untyped_storage().data_ptr() for v in bucket.views} == {bucket.flat.untyped_storage().data_ptr()}


def test_views_can_be_detached_in_place_where_slices_of_flat_cannot():
    """Users' ``zero_grad`` code calls ``grad.detach_()``."""
    bucket = packed([spec(2)], [torch.ones(2)])
    bucket.views[0].detach_().zero_()
    assert bucket.flat.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="detach views in-place"):
        bucket.flat[:1].detach_()


# -- sparse

ROWS = spec(4, 2, is_sparse=True)


def sparse_rows(rows: dict[int, list[float]] | list[tuple[int, list[float]]]) -> Tensor:
    pairs = list(rows.items()) if isinstance(rows, dict) else rows
    return torch.sparse_coo_tensor(
        [[i for i, _ in pairs]], [row for _, row in pairs], ROWS.shape, check_invariants=True
    )


def test_a_sparse_share_is_coalesced_and_divided():
    """Row 3 twice: (1 + 5, 2 + 6) / 2."""
    share = sparse_share(sparse_rows([(3, [1.0, 2.0]), (3, [5.0, 6.0])]), None, ROWS, 2)
    assert share.is_coalesced()
    assert share.indices().tolist() == [[3]] and share.values().tolist() == [[3, 4]]


@pytest.mark.parametrize("densify", [False, True], ids=["sparse", "dense"])
def test_what_was_held_back_is_added_to_a_sparse_gradient(densify):
    """Rows 0 and 3 held back, 3 and 1 fresh, over 2."""
    old = sparse_rows({0: [2.0, 2.0], 3: [4.0, 4.0]})
    share = sparse_share(sparse_rows({3: [2.0, 0.0], 1: [6.0, 8.0]}), old.to_dense() if densify else old, ROWS, 2)
    assert share.is_sparse and share.sparse_dim() == 1
    assert share.to_dense().tolist() == [[1, 1], [3, 4], [0, 0], [3, 2]]
    assert old.to_dense().tolist() == [[2, 2], [0, 0], [0, 0], [4, 4]]


def test_a_rank_without_a_sparse_gradient_contributes_no_rows():
    share = sparse_share(None, None, ROWS, 2)
    assert share.shape == (4, 2) and share.dtype is torch.float32
    assert (share.sparse_dim(), share.dense_dim()) == (1, 1) and share.is_coalesced()
    assert share.values().shape == (0, 2)


# -- handing back


def test_a_mean_laid_out_like_its_parameter_is_handed_back_as_it_is():
    mean = torch.ones(2, 3)
    assert with_strides_of(torch.empty(2, 3), mean) is mean


def test_a_mean_gets_the_strides_of_its_parameter():
    param = torch.empty(3, 2).t()
    given_back = with_strides_of(param, MATRIX)
    assert given_back.stride() == param.stride() == (1, 2)
    assert torch.equal(given_back, MATRIX)


@pytest.mark.parametrize("param", [torch.empty(3).expand(2, 3), WIDE[:2, ::2]], ids=["expanded", "sliced"])
def test_strides_that_are_not_dense_are_not_imitated(param):
    assert with_strides_of(param, MATRIX) is MATRIX


def test_a_sparse_mean_has_no_strides_to_change():
    mean = sparse_rows({1: [1.0, 2.0]})
    assert with_strides_of(torch.empty(2, 4).t(), mean) is mean
