"""CPUs that a control group grants, read from trees like those of the kernel."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from causal_encoder.serve import EncoderSession
from causal_encoder.serve import session as session_module
from causal_encoder.serve.cpu import available_cpus

HOST_CPUS = 8


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(HOST_CPUS)), raising=False)


class Groups:
    """A tree of control groups and the file that says which of them are ours."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.root.mkdir()
        self.membership = folder / "membership"

    def version_2(self, group: str, limit: str) -> None:
        self._write(group, "cpu.max", limit)

    def version_1(self, group: str, quota: str, period: str = "100000") -> None:
        self._write(group, "cpu.cfs_quota_us", quota)
        self._write(group, "cpu.cfs_period_us", period)

    def belong_to(self, text: str) -> None:
        self.membership.write_text(text)

    def cpus(self) -> int:
        return available_cpus(self.root, self.membership)

    def _write(self, group: str, name: str, content: str) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content + "\n")


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_without_control_groups_the_affinity_counts(groups: Groups) -> None:
    assert groups.cpus() == HOST_CPUS
    groups.root.rmdir()
    assert groups.cpus() == HOST_CPUS


def test_without_affinity_the_number_of_cpus_counts(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert groups.cpus() == 3
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert groups.cpus() == 1


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("100001 100000", 2),
        ("100000 100000", 1),
        ("10000 100000", 1),
        ("1000 1000000", 1),
        ("25000 10000", 3),
        ("800000 100000", 8),
        ("6400000 100000", 8),
        ("max 100000", 8),
    ],
)
def test_a_quota_of_version_2_is_rounded_up_and_never_raises_the_affinity(
    groups: Groups, limit: str, cpus: int
) -> None:
    groups.belong_to("0::/\n")
    groups.version_2("", limit)
    assert groups.cpus() == cpus


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("200000", "100000", 2), ("50000", "100000", 1), ("250000", "100000", 3), ("-1", "100000", 8)],
)
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_version_1_is_read_wherever_it_is_mounted(
    groups: Groups, mount: str, quota: str, period: str, cpus: int
) -> None:
    groups.belong_to(f"5:{mount}:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n")
    groups.version_1(f"{mount}/docker/abc", quota, period)
    assert groups.cpus() == cpus


def test_the_tightest_group_on_the_way_to_the_root_counts(groups: Groups) -> None:
    groups.belong_to("0::/kubepods/pod1/container\n")
    groups.version_2("", "max 100000")
    groups.version_2("kubepods", "600000 100000")
    groups.version_2("kubepods/pod1", "300000 100000")
    groups.version_2("kubepods/pod1/container", "400000 100000")
    assert groups.cpus() == 3


def test_a_parent_binds_a_group_without_a_limit(groups: Groups) -> None:
    groups.belong_to("0::/slice/job\n")
    groups.version_2("slice", "200000 100000")
    groups.version_2("slice/job", "max 100000")
    assert groups.cpus() == 2


def test_the_limit_of_a_sibling_is_none_of_ours(groups: Groups) -> None:
    groups.belong_to("0::/ours\n")
    groups.version_2("ours", "max 100000")
    groups.version_2("theirs", "100000 100000")
    groups.version_1("cpu/theirs", "100000")
    assert groups.cpus() == HOST_CPUS


def test_inside_a_container_the_own_group_is_mounted_at_the_root(groups: Groups) -> None:
    groups.belong_to("0::/docker/path-of-the-host\n")
    groups.version_2("", "200000 100000")
    assert groups.cpus() == 2


def test_inside_a_container_of_version_1_too(groups: Groups) -> None:
    groups.belong_to("5:cpu,cpuacct:/docker/path-of-the-host\n")
    groups.version_1("cpu", "300000")
    assert groups.cpus() == 3


def test_a_group_outside_the_namespace_is_no_hindrance(groups: Groups) -> None:
    groups.belong_to("0::/../../init.scope\n")
    groups.version_2("", "200000 100000")
    assert groups.cpus() == 2


def test_both_versions_at_once_are_both_read(groups: Groups) -> None:
    groups.belong_to("0::/unified\n3:cpu:/legacy\n")
    groups.version_2("unified", "500000 100000")
    groups.version_1("cpu/legacy", "400000")
    assert groups.cpus() == 4


@pytest.mark.parametrize(
    "content",
    ["", "max", "a b", "100000 0", "0 100000", "1.5 1", "1 2 3", "nan 100000", "\x00"],
)
def test_a_quota_that_makes_no_sense_is_no_quota(groups: Groups, content: str) -> None:
    groups.belong_to("0::/\n1:cpu:/\n")
    groups.version_2("", content)
    groups.version_1("cpu", content)
    assert groups.cpus() == HOST_CPUS


def test_a_quota_without_its_period_is_no_quota(groups: Groups) -> None:
    groups.version_1("cpu", "100000")
    (groups.root / "cpu" / "cpu.cfs_period_us").unlink()
    assert groups.cpus() == HOST_CPUS


def test_a_folder_in_place_of_a_quota_is_no_quota(groups: Groups) -> None:
    (groups.root / "cpu.max").mkdir()
    assert groups.cpus() == HOST_CPUS


@pytest.mark.parametrize("content", ["", "\n", "garbage\n", "0:\n", "::\n", "a:b:c:d\n", "\0\n"])
def test_a_membership_that_makes_no_sense_leaves_the_root(groups: Groups, content: str) -> None:
    groups.belong_to(content)
    groups.version_2("", "200000 100000")
    assert groups.cpus() == 2


def test_a_membership_that_is_not_text_leaves_the_root(groups: Groups) -> None:
    groups.membership.write_bytes(b"0::/\xff\xfe\n")
    groups.version_2("", "200000 100000")
    assert groups.cpus() == 2


def test_this_very_process_gets_at_least_one_cpu() -> None:
    assert 1 <= available_cpus() <= HOST_CPUS


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (1, 1), (2, 2)])
def test_a_session_takes_what_the_control_group_grants_unless_told_otherwise(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, expected: int
) -> None:
    used: list[int] = []
    open_model = onnxruntime.InferenceSession

    def spy(path: str, options: onnxruntime.SessionOptions, **others: Any) -> Any:
        used.append(options.intra_op_num_threads)
        return open_model(path, options, **others)

    monkeypatch.setattr(session_module, "available_cpus", lambda: 3)
    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    assert EncoderSession(bundle, "cpu", threads=threads).run([[1]]).shape == (1, 1, 12)
    assert used == [expected]


TASKS = Path("/proc/self/task")
needs_tasks = pytest.mark.skipif(not TASKS.exists(), reason="threads are not listed here")


@needs_tasks
@pytest.mark.parametrize("value", [None, "7", "99999", "many", ""])
def test_a_session_has_the_threads_that_were_asked_for_whatever_the_environment_says(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for name in ("OMP_NUM_THREADS", "ORT_INTRA_OP_NUM_THREADS", "ORT_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    sessions = []  # kept: a session that ends takes its threads with it
    for threads in (1, 2, 5):
        before = {task.name for task in TASKS.iterdir()}
        sessions.append(EncoderSession(bundle, "cpu", threads=threads))
        sessions[-1].run([[1, 2, 3]])
        give_up = time.monotonic() + 10  # one that was only there to load may still be ending
        while (
            len(started := {task.name for task in TASKS.iterdir()} - before) != threads - 1
            and time.monotonic() < give_up
        ):
            time.sleep(0.005)
        assert len(started) == threads - 1  # the caller works too


@needs_tasks
@pytest.mark.parametrize("threads", [None, 4])
def test_in_a_set_of_cpus_smaller_than_the_host_nothing_is_pinned_outside_and_nothing_is_said(
    bundle: Path, capfd: pytest.CaptureFixture[str], threads: int | None
) -> None:
    """Threads are pinned where their number is left open (onnxruntime issue 8313)."""
    program = """
import os, sys
from pathlib import Path
ours = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, ours)
from causal_encoder.serve import EncoderSession
session = EncoderSession(sys.argv[1], "cpu", threads=int(sys.argv[2]) or None)
print(session.run([[1, 2, 3]]).shape, flush=True)
tasks = [int(path.name) for path in Path("/proc/self/task").iterdir()]
assert all(os.sched_getaffinity(task) == ours for task in tasks), tasks
"""
    subprocess.run([sys.executable, "-c", program, bundle, str(threads or 0)], check=True)
    assert capfd.readouterr() == ("(1, 3, 12)\n", "")
