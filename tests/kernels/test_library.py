"""Which of the library's algorithms or doors a product takes, and that no choice outlives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from nvcli.kernels import cublaslt, library, tuned
from nvcli.kernels.cublaslt import Algorithm
from tests.kernels.triton_testing import assert_as_good_as_torch

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Of a table that a test has put in place, when all else is as it was."""
    yield
    tuned.forget()


class Doors:
    """Stands in for the products and for the process's choice; `cuda` tensors are fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.door, self.taken = "cublas", list[str]()
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", self.choose)
        monkeypatch.setattr(library, "_usual_door", cache(library._usual_door.__wrapped__))
        monkeypatch.setattr(torch, "mm", self.mm)
        monkeypatch.setattr(OnCuda, "addmm_", lambda total, x, y: self.mm(x, y), raising=False)

    def choose(self, door: str | None = None) -> str:
        self.door = door or self.door
        return self.door

    def mm(self, x: torch.Tensor, y: torch.Tensor, out: object = None) -> torch.Tensor:
        self.taken.append(self.door)
        if x.shape[0] == 40:
            raise torch.OutOfMemoryError
        return x


class OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def product(rows: int, columns: int, *, adds: bool = False) -> None:
    x, weight = torch.zeros(rows, columns).as_subclass(OnCuda), torch.zeros(2, columns)
    if adds:
        library.add_linear(x, weight, torch.zeros(rows, 2).as_subclass(OnCuda))
    else:
        library.linear(x, weight)


@pytest.mark.parametrize("adds", [False, True])
def test_some_dozens_of_long_rows_go_through_cublaslt(
    monkeypatch: pytest.MonkeyPatch, adds: bool
) -> None:
    doors = Doors(monkeypatch)
    for rows, columns, want in (
        (32, 4096, "cublas"),
        (33, 4096, "cublaslt"),
        (192, 12_288, "cublaslt"),
        (193, 4096, "cublas"),
        (64, 3072, "cublas"),
    ):
        product(rows, columns, adds=adds)
        assert (doors.taken.pop(), doors.door) == (want, "cublas"), (rows, columns)
    with pytest.raises(torch.OutOfMemoryError):
        product(40, 4096, adds=adds)
    assert (doors.taken.pop(), doors.door) == ("cublaslt", "cublas"), "also after an error"


def test_a_door_that_another_thread_holds_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors(monkeypatch)
    product(64, 4096)
    doors.door = "cublaslt"  # of an engine on another thread, which has not closed it yet
    product(64, 4096)
    assert doors.door == "cublas"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors(monkeypatch)
    monkeypatch.setattr(library, "_use_lt", False)
    product(64, 4096)
    assert doors.taken == ["cublas"]


def test_other_devices_have_one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors(monkeypatch)
    library.linear(torch.zeros(64, 4096), torch.zeros(2, 4096))
    assert doors.taken == ["cublas"]


class Named:
    """Stands in for cublasLt: what it was asked for; it computes with algorithm 1 alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, version: int = 130_100) -> None:
        line = {"columns": 4096, "outputs": 2, "adds": False, "rows": [33, 64]}
        lines = [
            {**line, "algorithm": [1] * 9},
            {**line, "algorithm": [2] * 9, "rows": [65, 72]},
            {**line, "algorithm": [1] * 9, "adds": True},
        ]
        part = {"products": [], "library": {"version": 130_100, "products": lines}}
        path.write_text(json.dumps({"sm_90": part}))
        monkeypatch.setenv("NVCLI_TUNED", str(path))
        monkeypatch.setattr(tuned, "_gpu_of", lambda index: "sm_90")
        monkeypatch.setattr(cublaslt, "version", lambda: version)
        monkeypatch.setattr(cublaslt, "multiply", self.multiply)
        monkeypatch.setattr(torch, "empty", lambda *shape, **_: torch.zeros(*shape))
        tuned.forget()
        self.asked: list[tuple[int, bool]] = []

    def multiply(
        self, x: object, weight: object, y: object, algorithm: Algorithm, *, adds: bool
    ) -> bool:
        self.asked.append((algorithm.id, adds))
        return algorithm.id == 1


def test_the_table_names_the_algorithm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doors, named = Doors(monkeypatch), Named(monkeypatch, tmp_path / "tuned.json")
    for rows, adds, asked, taken in (
        (33, False, [(1, False)], []),
        (64, True, [(1, True)], []),
        (72, False, [(2, False)], ["cublaslt"]),  # which cannot compute it: the library chooses
        (65, True, [], ["cublaslt"]),  # not in the table: as without one
        (32, False, [], ["cublas"]),
    ):
        doors.taken.clear()
        named.asked.clear()
        product(rows, 4096, adds=adds)
        assert (named.asked, doors.taken) == (asked, taken), (rows, adds)
    monkeypatch.setattr(library, "_use_lt", False)
    named.asked.clear()
    product(33, 4096)
    assert named.asked == []


def test_algorithms_are_of_one_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doors, named = Doors(monkeypatch), Named(monkeypatch, tmp_path / "tuned.json", version=130_200)
    product(33, 4096)
    assert (named.asked, doors.taken) == ([], ["cublaslt"])


def test_only_bfloat16_that_stands_together_is_multiplied_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cublaslt, "_prepared", lambda *problem: asked.append(problem))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of these tensors
    algorithm = Algorithm(*[1] * 9)

    def zeros(rows: int, columns: int, dtype: torch.dtype, beside: int = 0) -> torch.Tensor:
        """So many bytes beside what an allocation on a GPU begins at, or a multiple of it."""
        room = torch.zeros(rows * columns + 512, dtype=dtype)
        first = (-room.data_ptr() % cublaslt.ALIGNMENT + beside) // dtype.itemsize
        return room[first : first + rows * columns].view(rows, columns)

    def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        return [zeros(*shape, dtype) for shape in ((8, 64), (16, 64), (8, 16))]

    assert not cublaslt.multiply(*tensors(), algorithm, adds=False)
    assert asked == [(0, 8, 16, 64, algorithm)]
    asked.clear()
    for i in range(3):
        strange = tensors()
        strange[i] = zeros(*strange[i].shape[::-1], torch.bfloat16).t()
        assert not cublaslt.multiply(*strange, algorithm, adds=False), "strided"
        shifted = tensors()
        rows, columns = shifted[i].shape
        shifted[i] = zeros(rows, columns, torch.bfloat16, beside=128)
        assert not cublaslt.multiply(*shifted, algorithm, adds=False), "not where one begins"
    assert not cublaslt.multiply(*tensors(torch.float16), algorithm, adds=False)
    x, weight, y = tensors()
    narrow = zeros(8, 32, torch.bfloat16)
    assert not cublaslt.multiply(narrow, weight, y, algorithm, adds=False)
    assert not cublaslt.multiply(x, weight, y[:7], algorithm, adds=False), "it would write beyond"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not cublaslt.multiply(x, weight, y, algorithm, adds=False), "another is current"
    assert asked == []


def test_without_cuda_there_is_no_version() -> None:
    if torch.version.cuda is None:
        assert cublaslt.version() is None
    else:
        assert cublaslt.version() is None or cublaslt.version() > 100_000


# Those of the table that are quick to multiply in float32.
ENTRIES = [
    (line.columns, line.outputs, line.adds, line.rows[1])
    for line in tuned.read_table(tuned.TABLE)["sm_90"].algorithms
    if line.rows[1] <= 512 or line.columns * line.outputs <= 4096 * 4096
]


class Product:
    """One of the table on the GPU, by the library's door."""

    def __init__(self, columns: int, outputs: int, adds: bool, rows: int) -> None:
        if tuned.gpu_of(torch.device("cuda", 0)) != "sm_90":
            pytest.skip("the table is of sm_90")
        if cublaslt.version() != tuned._table_of("sm_90").library_version:
            pytest.skip("the table is of another version of cuBLAS")
        generator = torch.Generator("cuda").manual_seed(rows)
        shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.x = torch.randn(rows, columns, **shape)
        self.weight = torch.randn(outputs, columns, **shape) / columns**0.5
        self.before = torch.randn(rows, outputs, **shape)
        self.out, self.adds = self.before.clone(), adds

    def run(self) -> torch.Tensor:
        if not self.adds:
            return library.linear(self.x, self.weight, self.out)
        return library.add_linear(self.x, self.weight, self.out.copy_(self.before))

    def exact(self) -> torch.Tensor:
        y = self.x.float() @ self.weight.float().t()
        return y + self.before.float() if self.adds else y


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "outputs", "adds", "rows"), ENTRIES)
def test_named_algorithms_are_as_good_as_torch(
    monkeypatch: pytest.MonkeyPatch, columns: int, outputs: int, adds: bool, rows: int
) -> None:
    product = Product(columns, outputs, adds, rows)
    taken: list[bool] = []
    multiply = cublaslt.multiply
    monkeypatch.setattr(
        cublaslt, "multiply", lambda *a, **k: taken.append(multiply(*a, **k)) or taken[-1]
    )
    got = product.run().clone()
    again = product.run().clone()
    assert taken == [True, True], "it computed it"
    monkeypatch.setattr(library, "_use_lt", False)
    plain = product.run().clone()
    assert len(taken) == 2, "and not when it is turned off"
    assert_as_good_as_torch(got, plain, product.exact())
    assert torch.equal(got, again)


@pytest.mark.gpu
@pytest.mark.captures
def test_named_algorithms_are_captured() -> None:
    """Those with splits, too, which work in memory of their own."""
    lines = tuned.read_table(tuned.TABLE)["sm_90"].algorithms
    chosen = next(line for line in lines if line.algorithm.splits > 1)
    product = Product(chosen.columns, chosen.outputs, chosen.adds, chosen.rows[1])
    got = product.run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product.run()
    captured.zero_()
    graph.replay()
    assert torch.equal(got, captured)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 33, 100, 192, 193])
def test_both_give_the_same_to_rounding(rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    x, weight = torch.randn(rows, 4096, **shape), torch.randn(512, 4096, **shape) / 64
    total = torch.randn(rows, 512, **shape)
    exact = x.float() @ weight.float().t()
    out = torch.empty_like(total)
    assert library.linear(x, weight, out) is out
    for got, want in (
        (out, exact),
        (library.linear(x, weight), exact),
        (library.add_linear(x, weight, total.clone()), exact + total.float()),
    ):
        assert float((got.float() - want).norm() / want.norm()) < 4e-3
