"""All-gather + matmul: how long each algorithm takes."""

from __future__ import annotations

from collections.abc import Callable

from iris.ops.model.machine import FLAG_S, LAUNCH_S, MEET_S, WORD_S
from iris.ops.model.matmul import Call, Deal, library_s
from iris.ops.model.terms import AWAITED_STEP_S, STEP_S, exchange_s, flag_s, landing_s, multiplied_s, next_copy_s
from iris.ops.rows import abreast, arriving_groups, evenly

_GATHERED_S = 3e-6
"""How much longer a tile of a gather takes than one of a matmul alone."""
_COUNT_S = 8e-6
"""The time in which programs tell each other that all of them have stored their share."""
_APART = 2.0
"""How often B is read in a wave of other ranks' rows, whose tiles do not begin at the same time."""
_LANES_APART = 0.3
"""The share of the cost of whole waves of chunks that remains with two lanes."""
_OF_COLUMNS = 0.94
"""The library's matmul of some ranks' columns: its time over their share of that of the whole matmul, if that computes
longer than it reads (2 and 4 × H200, 2026-11-30)."""
_READING_S = 4e-6
"""The time of a chunk of few rows beside that for reading all of B."""
_PULL_STEP_S = 4e-6
"""``pull``: one block of K from a peer, waited for."""
_PIECES_S = 40e-6
"""``hbm_buffer``: the first tiles wait piece by piece, and refill their pipeline behind each piece."""
_SENDING_S, _ASKED_S = 2e-6, 0.2e-6
"""``push`` by programs that only send: from a kernel's start to the first stores; and the cost for a tile of each piece
of its rows, on average, since many pieces have arrived before the tile needs them."""
_SENT_BESIDE, _NARROW = 1.14, 1.2
"""``push`` by programs that only send: how much longer the links take if the matmul takes as long as they do; and how
much longer computing takes with tiles of fewer than 128 columns."""
_CONTENTION, _CHUNKS_CONTENTION = 0.17, 0.25
"""How much longer transfers take on 8 ranks because of incast (:meth:`.Call.contention`): in ``push`` by programs that
only send; and in chunks of all ranks' columns."""
_COLUMNS_S = 20e-6
"""``copy_engine``: an additional time of a gather of columns (2 and 4 × H200, 2026-11-27)."""
_ARRIVALS = 4
"""The number of rows of tiles in each part for which the arrival is considered."""


def _by_columns(call: Call) -> bool:
    return call.problem.gather_dim == 1


def _deal(call: Call, reserved: int = 0, *, together: bool = False) -> Deal:
    """The deal of a gather's tiles. ``together``: rows of several ranks arrive side by side."""
    if _by_columns(call):
        return call.deal(call.rows * call.columns, reserved)
    shard, passes = call.shard_rows * call.columns, call.passes
    if together or call.config.num_rounds > 1:
        waves = (call.world - 1) * shard / (call.programs(reserved) * call.config.num_rounds)
        passes = min(passes, 1 + call.passes_in(_APART * waves))
    return call.deal(call.world * shard, reserved, shard, _GATHERED_S, passes)


def _first_tile(call: Call, turn: int, row: int) -> int:
    """The number of the first tile in block row ``row`` of the rank that comes ``turn`` places after this one. This
    rank's tiles are all computed first. By columns there are no turns."""
    index = call.first_tile(row)
    if _by_columns(call):
        return index
    shard = call.shard_rows * call.columns
    per_round = -(-shard // call.config.num_rounds)
    before = index // per_round * per_round
    return shard + before * (call.world - 1) + (turn - 1) * min(per_round, shard - before) + index - before


def _keep_own_s(call: Call) -> float:
    """The copy of the own part, which programs make first if A is cut by columns."""
    return 2 * call.part_nbytes / call.machine.memory_rate if _by_columns(call) else 0.0


def _part(call: Call) -> tuple[int, int, int]:
    """The rows and columns of one rank's part of A, at least one each, and its rows of tiles."""
    m, k, world = call.problem.m, call.problem.k, call.world
    return (m, k // world or 1, call.rows) if _by_columns(call) else (m // world or 1, k, call.shard_rows)


def _copied(call: Call) -> float:
    _, _, rows = _part(call)
    chunks, per_chunk = evenly(rows, call.config.num_chunks)
    each = _sending_s(call, 1 / chunks)
    deal, arrivals = _deal(call), []
    for step in range(1, call.world):
        for chunk in range(chunks):
            first = _first_tile(call, step, chunk * per_chunk)
            if _by_columns(call):
                ready = (chunk * (call.world - 1) + step) * each
                arrivals.append((ready + FLAG_S, first, step / call.world))
            else:
                ready = ((step - 1) * chunks + chunk + 1) * each
                arrivals.append((ready + FLAG_S, first, 0.0))
    beside = LAUNCH_S + MEET_S + (_COLUMNS_S if _by_columns(call) else 0.0)
    return beside + max(_keep_own_s(call) + deal.total_s, deal.end_s(arrivals))


def _pushed(call: Call) -> float:
    if call.config.comm_sms is not None:
        return _sent(call, call.config.comm_sms)
    programs = call.programs()
    pushing = call.machine.store_s((call.world - 1) * call.part_nbytes, programs, call.world)
    return LAUNCH_S + MEET_S + pushing + _keep_own_s(call) + _COUNT_S + FLAG_S + _deal(call).total_s


def _sent(call: Call, senders: int) -> float:
    """Programs that only send. They send as many pieces at a time as there are senders: those of some chunks of rows
    side by side, then those of the next chunks; by columns the own chunks are among them. A tile begins when the first
    piece of its rows has arrived, and ends after the last has."""
    config, world, by_columns = call.config, call.world, _by_columns(call)
    senders = max(1, min(senders, call.programs() - 1))
    deal = _deal(call, senders, together=True)
    part_m, part_k, rows = _part(call)
    piece_k = min(config.k_per_flag * config.block_size_k, part_k)
    nbytes = min(config.block_size_m, part_m) * piece_k * call.problem.dtype.itemsize
    pieces = -(-part_k // piece_k) * (world if by_columns else 1)
    chunks = rows if by_columns else (world - 1) * rows
    tiles = (1 if by_columns else world) * rows * call.columns
    rounds = 1 if by_columns else config.num_rounds
    beside = max(1, abreast(chunks, tiles, deal.workers, call.columns, rounds, config.group_size_m))
    crossing = call.machine.store_s((world - 1) * call.part_nbytes, senders, world) * call.contention(_CONTENTION)
    crossing *= 1 + (_SENT_BESIDE - 1) * min(1.0, deal.total_s / crossing) if crossing else 1.0
    each = max(call.machine.send_s(nbytes), crossing * senders / max(1, chunks * pieces))

    def sent(count: float) -> float:
        return max(1.0, count / senders) * each + FLAG_S

    arrivals = []
    turns = -(-chunks // beside)
    for turn in {0, turns // 2, turns - 1} if turns else ():
        begin, end = turn * beside, min((turn + 1) * beside, chunks)
        for chunk, count, done in ((begin, begin * pieces + end - begin, 0.0), (end - 1, end * pieces, 1 - 1 / pieces)):
            arrivals.append((sent(count), _first_tile(call, 1 + chunk // rows, chunk % rows), done))
    computing = deal.end_s(arrivals) * (_NARROW if config.block_size_n < 128 else 1.0)
    return LAUNCH_S + _SENDING_S + pieces * _ASKED_S + computing


def _fetched(call: Call) -> float:
    config, machine_, world = call.config, call.machine, call.world
    fetchers = config.senders_among(call.programs())
    first = max(fetchers, config.first_stage_fetch_sms or 0)
    deal = _deal(call, min(fetchers, call.programs() - 1), together=True)
    item = call.problem.dtype.itemsize
    tile = config.comm_block_m * config.comm_block_n * item
    part_m, part_k, rows = _part(call)
    piece = min(config.block_size_m, part_m) * min(config.k_per_flag * config.block_size_k, part_k) * item
    parts = world if _by_columns(call) else world - 1
    nbytes = parts * call.part_nbytes
    first_share = 1 / config.num_fetch_stages
    first_s = machine_.fetch_s(nbytes, first, tile, piece, world)
    later_s = machine_.fetch_s(nbytes, fetchers, tile, piece, world)

    def ready(share: float) -> float:
        return MEET_S + min(share, first_share) * first_s + max(0.0, share - first_share) * later_s

    pieces = max(1, call.problem.k // (config.block_size_k * config.k_per_flag))
    arrivals = []
    for turn in range(1 if _by_columns(call) else world - 1):
        for row in {round(place * (rows - 1) / (_ARRIVALS - 1)) for place in range(_ARRIVALS)}:
            share = (row + 1) / rows if _by_columns(call) else (turn + (row + 1) / rows) / parts
            arrivals.append((ready(share), _first_tile(call, turn + 1, row), 1 - 1 / pieces))
    return LAUNCH_S + _PIECES_S + deal.end_s(arrivals) + MEET_S


def _pulled(call: Call) -> float:
    """Every tile of A that a peer has crosses the link once for each column of output tiles."""
    nbytes = (call.world - 1) * call.part_nbytes * call.columns
    crossing = call.machine.load_s(nbytes, call.programs(), call.world)
    deal = _deal(call)
    own = deal.total_s / call.world
    remote_tiles = deal.left(0) * (call.world - 1) / call.world
    crossing = max(crossing, remote_tiles * call.problem.k / call.config.block_size_k * _PULL_STEP_S)
    return LAUNCH_S + 2 * MEET_S + own + max(deal.total_s - own, crossing)


def _chunk_s(call: Call, share: float) -> float:
    """The library's matmul of a chunk of rows. Two chunks run side by side: the last wave of one overlaps with the
    first wave of the next."""
    computing = share * (_LANES_APART * library_s(call, 1 / share) + (1 - _LANES_APART) * library_s(call))
    return max(computing, share * call.machine.memory_s(call.config, call.problem, 1 / share) + _READING_S)


def _decomposed(call: Call) -> float:
    """The library's matmul of each chunk once it has arrived."""
    at_once = _by_columns(call) and not call.config.adds_columns(call.problem)
    return LAUNCH_S + (_by_chunks_s(call) if at_once else _by_rank_s(call)) + MEET_S


def _by_rank_s(call: Call) -> float:
    """The own part first, then that of one rank, or of several together, once they have arrived; the last part in
    chunks. It is the time of the slowest rank, since groups of ranks differ in size from rank to rank."""
    rows, _, _ = _part(call)
    shares, size = call.shares(rows), call.config.owners(call.config.cut(rows))
    slowest = 0.0
    for sizes in {tuple(map(len, arriving_groups(rank, call.world, size))) for rank in range(call.world)}:
        end, ready = _part_s(call, 1, 1.0, begun=False), 0.0
        for place, ranks in enumerate(sizes, 1):
            for share in shares if place == len(sizes) else [1.0]:
                ready += (ranks - 1) * _sending_s(call) + _sending_s(call, share)
                end = max(end, ready + FLAG_S) + _part_s(call, ranks, share, begun=True)
        slowest = max(slowest, end)
    return slowest


def _part_s(call: Call, ranks: int, share: float, *, begun: bool) -> float:
    """The library's matmul of the parts of ``ranks`` ranks, the last of which is cut, and this is a ``share`` of it.
    ``begun``: behind others. By columns it then reads and writes the sum of those before, which nothing hides."""
    if not _by_columns(call):
        return _chunk_s(call, (ranks - 1 + share) / call.world) + (STEP_S if begun else 0.0)
    adding = AWAITED_STEP_S + share * 2 * call.output_nbytes / call.machine.memory_rate
    whole = library_s(call) - LAUNCH_S
    computing = max(_OF_COLUMNS * whole, min(whole, call.machine.memory_s(call.config, call.problem)))
    return share * ranks / call.world * computing + (adding if begun else LAUNCH_S)


def _by_chunks_s(call: Call) -> float:
    """Chunks of rows, each of which needs the columns of all ranks."""
    end = ready = 0.0
    contention = call.contention(_CHUNKS_CONTENTION)
    for share in call.shares(call.problem.m):
        ready += (call.world - 1) * (next_copy_s(call, contention * share * call.part_nbytes) + flag_s(call))
        kept = end + share * _keep_own_s(call) + LAUNCH_S
        end = max(kept, ready + landing_s(call)) + STEP_S + _chunk_s(call, share)
    return end


def _sending_s(call: Call, share: float = 1.0) -> float:
    """A copy of this share of a part to a peer, and the flag behind it."""
    return call.machine.copy_s(share * call.part_nbytes) + WORD_S


def _exchanged(call: Call) -> float:
    return multiplied_s(call) + exchange_s(call, (call.world - 1) * call.part_nbytes, 0.0)


def _then(call: Call) -> float:
    pushing = call.machine.store_s((call.world - 1) * call.part_nbytes, call.programs(), call.world)
    copying = 2 * call.part_nbytes / call.machine.memory_rate
    return LAUNCH_S + 2 * MEET_S + _COUNT_S + pushing + copying + library_s(call)


ALGORITHMS: dict[str, Callable[[Call], float]] = {
    "pull": _pulled,
    "push": _pushed,
    "hbm_buffer": _fetched,
    "copy_engine": _copied,
    "decomposed": _decomposed,
    "low_latency": _exchanged,
    "baseline": _then,
}
