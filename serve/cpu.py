"""How many CPUs this process may really use.

A thread pool sized to the host is slow in a container that is given two CPUs of it
(microsoft/onnxruntime issue 29510), so the quota of the control group counts too.
"""

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")


def available_cpus(root: Path = _ROOT, membership: Path = _SELF) -> int:
    """The smaller of the CPU affinity and the CPU quota, rounded up; at least 1.

    Args:
        root: where control groups are mounted.
        membership: file that names the groups of this process.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root, membership))]))


def _quotas(root: Path, membership: Path) -> list[float]:
    """Every CPU quota that binds this process, in CPUs: its group's and all parents'."""
    quotas = []
    for group in _groups(root, membership):
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            if quota := _version_2_quota(folder) or _version_1_quota(folder):
                quotas.append(quota)
    return quotas


def _groups(root: Path, membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except (OSError, ValueError):
        return [root]
    groups = []
    for line in lines:
        _, controllers, path = (*line.replace("\0", "").split(":", 2), "?", "?")[:3]
        if controllers == "":
            groups.append(root / path.lstrip("/"))
        elif "cpu" in controllers.split(","):
            groups += [root / "cpu" / path.lstrip("/"), root / controllers / path.lstrip("/")]
    # In a container the path can be the host's; its own group is then mounted at the root.
    return [*groups, root, root / "cpu"]


def _version_2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version_1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
