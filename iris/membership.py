"""The ranks of a context: which form its job, which of them this process is, and which a group names."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from iris.errors import ArgumentError, BackendError, PeerDied, WaitTimeout, ranks_text, whole_number
from iris.identity import Identity, identity, require_one_host

Group = Any
"""A torch ProcessGroup, a sequence of ranks, or None for all ranks."""

_OF_TORCH = "torch.distributed"


def identify(group: Group, device: Any, timeout_s: float) -> Identity:
    """The identity of this rank; ``device``: its GPU, if the caller has named one. Collective if ``torch.distributed``
    is initialised: then all ranks must come within ``timeout_s``, and every context's job has a new name.

    Raises:
        WaitTimeout: some ranks did not come in time.
        PeerDied: the process that holds the store of ``torch.distributed`` is gone.
    """
    gpu = None if device is None else _index(device)
    if not _distributed():
        if group is not None:
            raise ArgumentError("iris", "group", "None, as torch.distributed is not initialised", type(group).__name__)
        who = identity() or Identity(0, 1, 0, f"alone {os.getpid()}", "this process alone")
        require_one_host(who)
        local_rank = who.local_rank if gpu is None else gpu
        return Identity(who.rank, who.world_size, local_rank, who.job, who.source)
    ranks = global_ranks(group)
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise ArgumentError("iris", "group", "a group that this rank belongs to", f"ranks {ranks}")
    if gpu is None:
        gpu = _local_rank()
    current = gpu
    if current is None:
        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    everyone = _meet(group, ranks, rank, [os.urandom(8).hex(), _host(), current], timeout_s)
    _require_one_host([host for _, host, _ in everyone])
    if gpu is None:
        chosen = {device for _, _, device in everyone}
        gpu = current if len(chosen) == len(ranks) else ranks[rank]
    return Identity(rank, len(ranks), gpu, everyone[0][0], _OF_TORCH)


def _meet(group: Group, ranks: list[int], rank: int, said: Any, timeout_s: float) -> list[Any]:
    """What each rank of ``group`` says. They exchange it through the store of ``torch.distributed``: a collective would
    wait until the group's own time limit, and start NCCL."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, name = _get_default_store(), group_name(group)
    count = f"iris/{name}/{ranks[rank]} has met"
    try:
        meeting = store.add(count, 0)
        keys = [f"iris/{name}/{meeting}/{one}" for one in ranks]
        if not store.check([keys[rank]]):  # else this rank tries again, and peers may have read the key
            store.set(keys[rank], json.dumps(said))
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:  # DistStoreError, with most kinds of stores
            late = [place for place, key in enumerate(keys) if not store.check([key])]
            if late:  # else the last one has come meanwhile
                others = global_names(late, ranks)
                raise WaitTimeout(
                    f"iris.iris: rank {rank} waited {timeout_s:g} s for {ranks_text(late)} of the process group to "
                    f"make a context, too{f' ({others})' if others else ''}. "
                    "Slow but healthy ranks need a larger first_timeout_s.",
                    late,
                ) from None
        everyone = [json.loads(answer) for answer in store.multi_get(keys)]
        store.add(count, 1)  # only now: a rank that has not met the others tries the same meeting again
        if meeting:
            store.delete_key(f"iris/{name}/{meeting - 1}/{ranks[rank]}")  # all ranks are here, so they have read it
    except torch.distributed.DistNetworkError as error:
        text = "the store of torch.distributed is gone, with the process that held it, mostly rank 0's"
        raise PeerDied(f"iris.iris: {text}: {error}") from error
    return everyone


def global_ranks(group: Group) -> list[int]:
    """The ranks that the context's ranks have in ``torch.distributed``, in rank order; empty if that is not used."""
    if not _distributed():
        return []
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("iris", "group", "a group that this rank belongs to", "a group without this rank")
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        expected = "a torch ProcessGroup, made with torch.distributed.new_group or mesh.get_group(dimension)"
        raise ArgumentError("iris", "group", expected, type(group).__name__)
    return list(torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD))


def group_name(group: Group) -> str:
    """The name that ``torch.distributed`` has for the process group; empty if that is not used."""
    if not _distributed():
        return ""
    from torch.distributed.distributed_c10d import _get_default_group

    return str((group or _get_default_group()).group_name)


def global_names(ranks: Iterable[int], of_torch: list[int]) -> str:
    """The numbers that ``torch.distributed`` has for ``ranks`` of a context, if they differ; ``of_torch``: its numbers
    of all ranks of the context."""
    others = [rank for rank in ranks if rank in range(len(of_torch)) and of_torch[rank] != rank]
    return ", ".join(f"rank {rank} is rank {of_torch[rank]} of torch.distributed" for rank in others)


def members(op: str, group: Group, rank: int, world_size: int, of_torch: list[int]) -> tuple[int, ...]:
    """The ranks of a context that ``group`` names, sorted; this ``rank`` must be among them. ``of_torch``: the numbers
    of the context's ranks in ``torch.distributed``."""
    if group is None:
        return tuple(range(world_size))
    expected = f"distinct ranks from 0 to {world_size - 1} with this rank, {rank}, among them"
    listed: list[Any]
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(op, "group", expected, "a group without this rank")
    if isinstance(group, torch.distributed.ProcessGroup):
        if not of_torch:
            expected = "a sequence of ranks: the context was made before torch.distributed was initialised"
            raise ArgumentError(op, "group", expected, "a ProcessGroup")
        listed = torch.distributed.get_process_group_ranks(group)
        ranks = [of_torch.index(one) if one in of_torch else -1 for one in listed]
    else:
        listed = _elements(op, group)
        ranks = [whole_number(one) for one in listed]
    if not all(0 <= one < world_size for one in ranks) or rank not in ranks or len(set(ranks)) != len(ranks):
        raise ArgumentError(op, "group", expected, listed)
    return tuple(sorted(ranks))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _local_rank() -> int | None:
    """The launcher's local rank; None if it has set none."""
    text = os.environ.get("LOCAL_RANK")
    if text and not text.isdecimal():
        raise ArgumentError(
            "iris", "LOCAL_RANK", "the number of this rank's GPU", repr(text), "Set it, or pass device=…."
        )
    return int(text) if text else None


def _elements(op: str, group: Group) -> list[Any]:
    if not isinstance(group, str | bytes | torch.Tensor):
        with contextlib.suppress(TypeError):
            return list(group)
    expected = "a torch ProcessGroup, as mesh.get_group(dimension) gives it, or a sequence of ranks"
    raise ArgumentError(op, "group", expected, type(group).__name__)


def _index(device: Any) -> int:
    """The number of a device, given as a number, a name or a torch.device; a name without a number is the current
    GPU."""
    expected = "a GPU: its number, name or torch.device"
    try:
        found = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError("iris", "device", expected, repr(device)) from error
    if found.type == "cuda" and found.index is not None:
        return found.index
    if found.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.current_device()
    if found.type != "cuda" and (found.type != "cpu" or torch.cuda.is_available()):
        raise ArgumentError("iris", "device", expected, repr(device))
    return 0  # simulated


def _host() -> str:
    """An identifier of this host, unique to it and to its last boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _require_one_host(hosts: list[str]) -> None:
    if len(set(hosts)) > 1:
        here = [rank for rank, host in enumerate(hosts) if host == _host()]
        raise BackendError(
            f"the ranks are on {len(set(hosts))} hosts, and Iris works within one; ranks {here} of the group are on "
            "this one. Pass group=torch.distributed.new_group(...) with the ranks of one host."
        )
