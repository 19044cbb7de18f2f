"""Which of the library's two doors a product goes through, and that no choice outlives it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from nvcli.kernels import library

pytestmark = pytest.mark.torch


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
